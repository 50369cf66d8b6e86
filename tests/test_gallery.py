"""The comparison of the gallery sees what packed parts hold, not how they were packed."""

import importlib.util
import zlib
from base64 import b64encode
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]


def _make():
    spec = importlib.util.spec_from_file_location("gallery_make", ROOT / "reports" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _page(folder, content, level):
    folder.mkdir()
    deflate = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    text = b64encode(deflate.compress(content) + deflate.flush()).decode()
    (folder / "one.html").write_text(f"<script>{text}</script>")
    return text


def test_packed_parts_are_compared_by_what_they_hold(tmp_path, monkeypatch):
    make = _make()
    content = b" ".join(str(number).encode() for number in np.random.default_rng(0).integers(0, 50, 4000))
    packed = [_page(tmp_path / name, content, level) for name, level in (("here", 1), ("made", 9))]
    _page(tmp_path / "other", content + b"7", 9)
    monkeypatch.setattr(make, "HERE", tmp_path / "here")
    assert packed[0] != packed[1]
    assert make._differences(tmp_path / "made") == []
    assert make._differences(tmp_path / "other") == ["one.html"]
