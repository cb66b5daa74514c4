"""The cubin behind a kernel: by the handle that loaded it, else by name."""

from hashlib import sha256
from pathlib import Path

import pytest
from cubin_patching import header_of, patched

from nimblec.base.errors import UnsupportedModelError
from nimblec.cuda.capture import modules
from nimblec.cuda.capture.cubin_cut import cut
from nimblec.cuda.capture.cubin_reading import entry_symbols
from nimblec.cuda.capture.cupti import CodeRecorder
from nimblec.cuda.capture.elf import UnfamiliarCubinError
from nimblec.cuda.capture.modules import CodeIndex, origin, reports_to_host
from nimblec.cuda.capture.nodes import Function

DATA = Path(__file__).parents[1] / "data"
IMAGE, TWIN, OTHER = ((DATA / f"{n}.cubin").read_bytes() for n in ("kernels.sm_90a", "kernels.sm_80", "delay.sm_90"))
DIGEST, TWIN_DIGEST = sha256(IMAGE).digest(), sha256(TWIN).digest()
SYMBOL = min(entry_symbols(IMAGE))


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[int, bytes]:
    """Return the images of modules, by handle."""
    images: dict[int, bytes] = {}
    monkeypatch.setattr(modules, "kernels_of", lambda handle: entry_symbols(images[handle]) if handle in images else ())
    return images


def _function(symbol: str, *, module: int = 0, library: int = 0) -> Function:
    return Function(symbol=symbol, parameters=(), module=module, library=library)


def refuse(_image: bytes, _symbols: list[str]) -> bytes:
    raise UnfamiliarCubinError("cubin: section 3 is of type 99; keep it as captured")


def _index(*images: bytes, **handles: dict[int, bytes]) -> CodeIndex:
    return CodeIndex(CodeRecorder(images={sha256(i).digest(): i for i in images}, **handles))


def test_a_name_that_one_image_has_is_enough() -> None:
    assert _index(IMAGE, OTHER).digest(_function(SYMBOL)) == DIGEST


def test_a_handle_tells_images_of_equal_names_apart() -> None:
    index = _index(IMAGE, TWIN, of_library={7: TWIN_DIGEST}, of_module={9: DIGEST})
    assert index.digest(_function(SYMBOL, library=7)) == TWIN_DIGEST
    assert index.digest(_function(SYMBOL, module=9)) == DIGEST
    with pytest.raises(UnsupportedModelError, match="2 loaded modules hold a kernel of this name"):
        index.digest(_function(SYMBOL))


def test_the_other_kernels_of_its_module_tell_images_apart(loaded: dict[int, bytes]) -> None:
    pair = cut(TWIN, sorted(entry_symbols(TWIN))[:2])
    index = _index(IMAGE, pair)
    loaded |= {1: IMAGE, 2: pair}
    assert index.digest(_function(SYMBOL, module=1)) == DIGEST
    assert index.digest(_function(SYMBOL, module=2)) == sha256(pair).digest()
    with pytest.raises(UnsupportedModelError, match="2 loaded modules hold a kernel of this name"):
        index.digest(_function(SYMBOL, module=3))


def test_images_with_the_same_code_serve_alike() -> None:
    pair = cut(IMAGE, sorted(entry_symbols(IMAGE))[:2])
    assert _index(pair, IMAGE).digest(_function(SYMBOL)) == sha256(pair).digest()
    assert _index(IMAGE, pair).digest(_function(SYMBOL)) == DIGEST


def test_a_kernel_that_nobody_loaded_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="0 loaded modules"):
        _index(OTHER).digest(_function(SYMBOL))


def test_code_is_cut_down_to_the_kernels_needed() -> None:
    index = _index(IMAGE)
    cut = index.shrunk(DIGEST, [SYMBOL])
    assert entry_symbols(cut) == {SYMBOL}
    assert len(cut) < len(IMAGE)
    assert index.kept_whole == []


def test_code_without_other_kernels_loses_what_debuggers_read() -> None:
    symbols = sorted(entry_symbols(IMAGE))
    kept = _index(IMAGE).shrunk(DIGEST, symbols)
    assert entry_symbols(kept) == set(symbols)
    assert b".debug_frame" in IMAGE
    assert b".debug_frame" not in kept


def test_code_that_is_not_understood_stays_whole_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "cut", refuse)
    index = _index(IMAGE)
    assert index.shrunk(DIGEST, [SYMBOL]) == IMAGE
    (note,) = index.kept_whole
    assert SYMBOL in note
    assert "type 99" in note


def test_code_index_skips_damaged_part() -> None:
    damaged = patched(IMAGE, header_of(IMAGE, ".nv.callgraph") + 24, "<Q", len(IMAGE))  # lies past the end
    index = _index(damaged)
    assert index.shrunk(index.digest(_function(SYMBOL)), [SYMBOL]) == damaged
    (note,) = index.kept_whole
    assert "section ends at" in note


def test_the_origin_is_a_label() -> None:
    assert origin(["triton_poi_fused_relu_0"]) == "triton"
    assert origin(["_ZN2at6native29vectorized_elementwise_kernel"]) == "aten"
    assert origin(["my_kernel"]) == "other"


def test_batch_norms_of_cudnn_that_read_once_report_overflows() -> None:
    names = ("24bn_fw_tr_1C11_singleread", "29bn_fw_tr_1C11_singleread_spec", "21bn_bw_1C11_singleread")
    assert all(reports_to_host(f"_ZN5cudnn{name}IfLi512ELb1E") for name in names)
    assert not reports_to_host("_ZN5cudnn25bn_fw_tr_1C11_kernel_NCHWIfflLi128E")
    assert not reports_to_host("my_bn_bw_1C11_singleread")
