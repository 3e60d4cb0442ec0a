"""The hand-over: KV cache from a prefill engine's blocks into a decode engine's, rank to rank.

plan.py      which rank sends which heads to which, in which messages: pure
events.py    what link threads report
control.py   the link's control socket: framed messages, mutual challenge, liveness
pair.py      the two-rank torch.distributed group that carries the payload
landing.py   where KV may be written: the receiver's side of one request
sender.py    a thread a link at prefill
receiver.py  a listener and a thread a link at decode
links.py     all links of one rank
"""
