"""What every room may know and no room owns: errors, ids, the frozen request, wire messages, telemetry names, limits.

Imports nothing of ours and neither torch nor Ray nor gRPC, so that any process can afford it.
"""
