"""A worker group of several ranks: one model, one KV cache and one order of steps, divided over processes.

layout.py     which heads, rows and experts each rank holds: pure
group.py      the ranks' collectives over torch.distributed
symmetric.py  memory that ranks lend each other, for small sums in one launch
layers.py     the decoder's parallel layers: they know their group, nothing else of the model does
experts.py    experts divided over ranks: dispatch and combine
orders.py     what the first rank tells the others at each step, and what they answer
lead.py       the first rank's side of that line
follow.py     the loop of every other rank
"""
