"""A router's process has no torch: its tokenizer is the same without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from diptych.router.chat import ChatTemplate
from diptych.router.client import ask
from diptych.router.conversation import conversation
from diptych.router.tokenizer import Tokenizer

_ALONE = """
import json, sys
from pathlib import Path
from tests.router.test_tokenizer import told
from diptych.router.tokenizer import Tokenizer

print(json.dumps([told(Tokenizer.load(Path(sys.argv[1]))), "torch" in sys.modules]))
import torch

assert torch.ones(1).sum() == 1, "it may still be loaded"
"""


def told(tokenizer: Tokenizer) -> list[object]:
    """What a router takes from it: ids of a text and of a chat, the text of ids, the end token."""
    messages = [{"role": "user", "content": "Hi <|im_end|> 🌍"}]
    ids, text = ChatTemplate(tokenizer).encode(conversation(ask(messages=messages).chat))
    plain = tokenizer.encode("Once upon a time 🌈\n")
    return [list(ids), text, list(plain), tokenizer.text(plain), tokenizer.eos_id]


def test_it_is_the_same_in_a_process_without_torch(tokenizer: Tokenizer, demo_model: Path) -> None:
    command = [sys.executable, "-c", _ALONE, str(demo_model)]
    folder = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [told(tokenizer), False]
