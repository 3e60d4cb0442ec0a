"""The public protocol, generated from `proto/diptych/v1` (`make proto`, and every build); only this file is committed."""
