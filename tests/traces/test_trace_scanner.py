"""The scanner in C reads what the reader in Python reads, to the last bit, and leaves everything unusual to it."""

from __future__ import annotations

import collections
import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from example_counts import seeds
from fakes.damaged_traces import BLOCKS, damaged_text, differences, fields_of, full_trace, odd_document, parts

from stepscope.cli.commands.doctor import checks
from stepscope.traces.reading import scanned
from stepscope.traces.reading.files import read_trace
from stepscope.traces.reading.kineto import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "traces" / "data"
OPERATOR = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": 5, "dur": 1, "args": {}}
OPERATOR_TEXT = json.dumps(OPERATOR)


@pytest.fixture(autouse=True, scope="module")
def scanner() -> scanned.Scanner:
    function = scanned.scanner_function()
    if function is None:
        pytest.skip("the scanner in C was not built: no C compiler")
    return scanned.Scanner(function, SETTINGS.search)


def assert_same(text: bytes, size: int = 1 << 20) -> None:
    assert not differences(text, size), text


def test_a_full_trace(scanner: scanned.Scanner) -> None:
    made = full_trace()
    assert_same(made.text())
    piece = scanner(json.dumps(made.events).encode())
    assert piece is not None
    assert piece.events == len(made.events)


@pytest.mark.parametrize("separators", [(",", ":"), (" , ", "\t:\n ")])
def test_any_white_space(separators: tuple[str, str]) -> None:
    assert_same(json.dumps(full_trace().document(), separators=separators).encode())


def assert_files_same(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths
    for path in paths:
        both = []
        for pure in ("", "1"):
            monkeypatch.setenv(scanned.PURE, pure)
            both.append(parts(read_trace(path)))
        assert both[0] == both[1], path


def test_a_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_files_same([DATA / "compiled_2_13.json.gz"], monkeypatch)


@pytest.mark.soak
def test_files_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_files_same(sorted(DATA.rglob("*.json.gz")), monkeypatch)


@pytest.mark.soak
def test_public_files(monkeypatch: pytest.MonkeyPatch, shared_data: Path) -> None:
    assert_files_same(sorted((shared_data / "traces").rglob("*.json.gz")), monkeypatch)


@pytest.mark.parametrize(
    ("usual", "unusual"),
    [
        ('"ts": 5', '"ts": 5.0001'),
        ('"ts": 5', '"ts": 5e0'),
        ('"ts": 5', '"ts": -5'),
        ('"ts": 5', '"ts": 05'),
        ('"ts": 5', '"ts": "5"'),
        ('"ts": 5', '"ts": 2305843009213694'),
        ('"ts": 5', '"ts": 99999999999999999999'),
        ('"ts": 5', '"ts": -9223372036854775808'),
        ('"ts": 5, ', ""),
        ('"dur": 1', '"dur": null'),
        ('"dur": 1', '"dur": 8796093022208.5'),
        ('"dur": 1', '"dur": NaN'),
        ('"pid": 1', '"pid": 1.0'),
        ('"pid": 1', '"pid": 18446744073709551615'),
        ('"pid": 1', '"pid": 1, "pid": 2'),
        ('"pid": 1', '"pid": "\\u0031"'),
        ('"ph": "X"', '"ph": "?"'),
        ('"ph": "X"', '"ph": "B"'),
        ('"ph": "X", ', ""),
        ('"ph"', '"p\\u0068"'),
        ("aten::mm", "\\ud83d\\ude00"),
        ("aten::mm", "\\ud83d"),
        ("aten::mm", "\\x"),
        ("aten::mm", "a\nb"),
        ("aten::mm", "a\0b"),
        ('"args": {}', '"args": null'),
        ('"args": {}', '"args": {"device": 1e1}'),
        ('"args": {}', '"args": {"correlation": 9223372036854775808}'),
        ('"args": {}', '"args": {"correlation": 1, "correlation": 2}'),
        ('"args": {}', '"args": {"Call stack": null}'),
        ('"args": {}', '"args": {"est. achieved occupancy %": 0.12345678901234567}'),
        ('"args": {}', '"args": {"x": ' + "[" * 40 + "]" * 40 + "}"),
        ('"args": {}', '"args": {"x": 1,}'),
        ('"args": {}', '"args": {"x": tru}'),
        ('"args": {}', '"args": {"x": 1.}'),
        ("}}", "}"),
        ("}}", "}}}"),
    ],
)
def test_the_unusual_is_left_to_python(scanner: scanned.Scanner, usual: str, unusual: str) -> None:
    assert usual in OPERATOR_TEXT
    text = f"[{OPERATOR_TEXT}, {OPERATOR_TEXT.replace(usual, unusual)}]".encode()
    assert scanner(text) is None
    assert_same(text)


@pytest.mark.parametrize(
    "text", [b"", b"[", b"[]", b"[1]", b"{}", b"[{}]", b'[{"ph":"X","ts":1}', b'[{"ph":"M","ts":1}]x']
)
def test_what_is_no_list_of_events(scanner: scanned.Scanner, text: bytes) -> None:
    assert scanner(text) is None


@pytest.mark.parametrize("text", ["é", "数据/训练.py", "\u0800\ud7ff\ue000\uffff", "\U00010000\U0010ffff", "\x7f\x80"])
def test_texts_beyond_ascii(scanner: scanned.Scanner, text: str) -> None:
    arguments = {"Call stack": f'{text}(1): "f"', "Input Dims": [text], text: text, "Sequence number": 1}
    events = [
        {**OPERATOR, "cat": category, "name": text, "tid": text, "args": arguments} for category in ("cpu_op", text)
    ]
    events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": text, "args": {"name": text}})
    for ascii_only in (True, False):
        document = json.dumps({"traceEvents": events}, ensure_ascii=ascii_only).encode()
        assert_same(document)
    piece = scanner(json.dumps(events, ensure_ascii=False).encode())
    assert piece is not None
    assert piece.texts["name"] == [text.encode()]


@pytest.mark.parametrize(
    "wrong",
    [
        b"\x80",
        b"\xc1\xbf",
        b"\xc3",
        b"\xe0\x9f\xbf",
        b"\xed\xa0\x80",
        b"\xf0\x8f\xbf\xbf",
        b"\xf4\x90\x80\x80",
        b"\xf5",
    ],
)
def test_invalid_utf_8_is_left_to_python(scanner: scanned.Scanner, wrong: bytes) -> None:
    text = f"[{OPERATOR_TEXT}]".encode().replace(b"aten", wrong)
    assert scanner(text) is None
    assert_same(text)


def test_many_texts(scanner: scanned.Scanner) -> None:
    """The tables grow."""
    events = [{**OPERATOR, "name": f"name {at}", "pid": at} for at in range(5000)]
    piece = scanner(json.dumps(events).encode())
    assert piece is not None
    numbers = [np.frombuffer(*piece.columns[name]).tolist() for name in ("name", "thread")]
    assert numbers == [list(range(5000))] * 2


def test_memory_that_runs_out() -> None:
    """Every allocation fails once; each time nothing is left behind, and the next piece is read."""
    testing = pytest.importorskip("_testcapi", reason="this Python came without its tests")
    function = scanned.scanner_function()
    assert function is not None
    text = json.dumps(full_trace().events).encode()
    kinds: dict[bytes, int] = collections.defaultdict(int)
    settings: dict[bytes, int] = collections.defaultdict(int)
    expected = function(text, kinds, settings)
    failed = 0
    while True:
        testing.set_nomemory(failed, 0)
        try:
            found = function(text, kinds, settings)
        except MemoryError:
            found = None
        finally:
            testing.remove_mem_hooks()
        if found is not None:
            break
        failed += 1
    assert found == expected
    assert failed > 100


def test_nothing_is_left_behind() -> None:
    function = scanned.scanner_function()
    assert function is not None
    texts = [json.dumps(full_trace().events).encode(), f"[{OPERATOR_TEXT}, 1]".encode(), b"[" + b"[" * 40]
    kinds: dict[bytes, int] = collections.defaultdict(int)

    def read_all() -> int:
        for text in texts:
            function(text, kinds, kinds)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        read_all()
        before = read_all()
        for _ in range(99):
            read_all()
        assert read_all() - before < 1000  # the smallest object has 16 bytes
    finally:
        tracemalloc.stop()


def test_an_error_of_a_mapping_is_passed_on() -> None:
    function = scanned.scanner_function()
    assert function is not None
    text = f"[{OPERATOR_TEXT}]".encode()
    with pytest.raises(KeyError):
        function(text, {}, {})
    with pytest.raises(TypeError):
        function(text, {b"cpu_op": "1"}, {})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        function(text.decode(), {}, {})  # type: ignore[arg-type]


@pytest.mark.seeds
@pytest.mark.parametrize("seed", seeds(16))
def test_odd_and_damaged_text(seed: int) -> None:
    """As ``bench/trace_fuzz.py`` does for as long as one likes, with sanitizers."""
    random_ = random.Random(seed)
    made = full_trace()
    events = [fields_of(event) for event in made.events]
    for _ in range(10):
        assert_same(damaged_text(random_, made.text()), random_.choice(BLOCKS))
        assert_same(odd_document(random_, events), random_.choice(BLOCKS))


def test_no_compiler_is_one_line(tmp_path: Path) -> None:
    """An install without a compiler succeeds, and says what that costs."""
    target = tmp_path / "src" / "stepscope" / "traces" / "reading"
    target.mkdir(parents=True)
    for part in ("hatch_build.py", "web/build_page.py"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        (tmp_path / part).write_bytes((ROOT / part).read_bytes())
    command = [sys.executable, str(tmp_path / "hatch_build.py")]
    done = subprocess.run(command, env={"CC": str(tmp_path / "cc")}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [f"no C compiler ({tmp_path / 'cc'}: No such file or directory)"]
    assert list(target.iterdir()) == []


def test_doctor_says_which_parts_in_c_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def weak() -> list[str]:
        return [check.what.split(",")[0] for check in checks(tmp_path) if "Python" in check.what and check.advice]

    monkeypatch.setenv("STEPSCOPE_C_HOOKS", "1")
    assert not weak()
    monkeypatch.setitem(sys.modules, "stepscope.traces.reading.native_scan", None)
    monkeypatch.setitem(sys.modules, "stepscope.recorder.hooks.native_hooks", None)
    assert weak() == ["traces are read by Python alone", "all hooks are in Python"]
    monkeypatch.setenv("STEPSCOPE_C_HOOKS", "0")
    assert weak() == ["traces are read by Python alone"]
