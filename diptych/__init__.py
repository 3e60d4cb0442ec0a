"""Diptych: disaggregated inference for large language models.

The rooms `router`, `cluster`, `workers` and `kernels` stand at the repository's top level and are linked in here, so
that they install as `diptych.router` and so on and never clash with another package of the same bare name.
"""

__version__ = "0.1.0"
