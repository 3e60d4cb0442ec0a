"""The public protocol, generated from `proto/diptych/v1` at every build; only this file is committed."""
