"""Writes GGUF files, by the gguf package.

Source: the GGUF specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from jackfield.errors import ConfigError
from jackfield.interfaces import ModelExporter, ModelSource
from jackfield_quantization.gguf_file import GgufFile
from jackfield_quantization.gguf_layout import Array, Layout, layout_of
from jackfield_quantization.gguf_vocabulary import add_vocabulary

ENDS = ("eos", "eot", "eom")
"""The keys that the ids have which end a generation: of a text, of a turn, of a message."""
LARGEST_HALF = 65504.0
"""Of float16, in which the scales of blocks are stored too."""
SAMPLING = {
    "temperature": gguf.GGUFWriter.add_sampling_temp,
    "top_k": gguf.GGUFWriter.add_sampling_top_k,
    "top_p": gguf.GGUFWriter.add_sampling_top_p,
    "min_p": gguf.GGUFWriter.add_sampling_min_p,
    "repetition_penalty": gguf.GGUFWriter.add_sampling_penalty_repeat,
}
"""What writes each sampling default."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to write.

    Args:
        name: in the file. source: in the checkpoint. shape: of both. kind: GGML type.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    kind: Kind


class GgufExporter(ModelExporter):
    """Writes ``NAME-TYPE.gguf``. Matrices have the type; embedding and output projection have eight bits where it has
    fewer; matrices whose rows are no whole blocks are float16; all of one dimension is float32.
    """

    def __init__(self, type: str) -> None:
        self._type = type

    def write(self, source: ModelSource, folder: Path) -> None:
        """See ModelExporter."""
        layout = layout_of(source)
        name = f"{source.name}-{self._type}.gguf"
        unfinished = folder / f"{name}.part"
        writer = gguf.GGUFWriter(unfinished, gguf.MODEL_ARCH_NAMES[layout.arch])
        self._add_keys(writer, source, layout)
        entries = list(self._entries(source, layout))
        for entry in entries:
            kind, shape = entry.kind, entry.shape
            packed = kind not in (Kind.F32, Kind.F16)
            stored = gguf.quant_shape_to_byte_shape(shape, kind) if packed else shape
            dtype = np.dtype(np.uint8 if packed else np.float16 if kind == Kind.F16 else np.float32)
            writer.add_tensor_info(entry.name, stored, dtype, int(np.prod(stored)) * dtype.itemsize, kind)
        for key, factors in layout.more.items():
            writer.add_tensor_info(key, factors.shape, factors.dtype, factors.nbytes, Kind.F32)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for entry in entries:
                writer.write_tensor_data(self._packed(source, layout, entry))
            for factors in layout.more.values():
                writer.write_tensor_data(factors)
            writer.close()
            unfinished.rename(folder / name)
        finally:
            writer.close()
            unfinished.unlink(missing_ok=True)

    def _add_keys(self, writer: gguf.GGUFWriter, source: ModelSource, layout: Layout) -> None:
        kind = self._type.upper()
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(source.name)
        file_type = gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"]
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        layout.add_to(writer)
        for key, add in SAMPLING.items():
            if key in source.sampling:
                value = source.sampling[key]
                add(writer, int(value) if key == "top_k" else float(value))
        own = None
        if source.tokenizer is None:
            writer.add_tokenizer_model("none")
        else:
            own = add_vocabulary(writer, source.tokenizer, layout.vocab_size)
        self._add_ends(writer, source, own)

    def _add_ends(self, writer: gguf.GGUFWriter, source: ModelSource, own: int | None) -> None:
        ends = tuple(dict.fromkeys((*(() if own is None else (own,)), *source.eos_token_ids)))
        if len(ends) > len(ENDS):
            raise ConfigError(
                f"a GGUF file names {len(ENDS)} tokens that end a generation, and the model has {len(ends)}",
                field="eos_token_id",
                value=list(ends),
                remedy="name a generation_config.json with fewer of them with --model.generation-config",
            )
        for key, number in zip(ENDS, ends, strict=False):
            getattr(writer, f"add_{key}_token_id")(number)

    def _entries(self, source: ModelSource, layout: Layout) -> Iterator[Entry]:
        """Yield what is written, in the checkpoint's order."""
        for found, fact in source.tensors.items():
            name = layout.name(found)
            yield Entry(name, found, fact.shape, self._kind(name, fact.shape))

    def _kind(self, name: str, shape: tuple[int, ...]) -> Kind:
        kind = Kind[self._type.upper()]
        if len(shape) < 2:
            return Kind.F32
        if re.fullmatch(r"token_embd\.weight|output\.weight", name) and kind not in (Kind.F32, Kind.F16, Kind.BF16):
            kind = Kind.Q8_0
        return kind if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else Kind.F16

    def _packed(self, source: ModelSource, layout: Layout, entry: Entry) -> Array:
        array = layout.rows(entry.source, source.read(entry.source).float().numpy())
        largest = float(np.abs(array).max(initial=0.0))
        if entry.kind not in (Kind.F32, Kind.BF16) and not largest <= LARGEST_HALF:
            raise ConfigError(
                f"{entry.source} has numbers that {entry.kind.name} cannot hold",
                field=f"plugins.options.{GgufFile.name}.type",
                value=self._type,
                remedy="use the type bf16 or f32",
            )
        packed: Array = gguf.quants.quantize(array, entry.kind)
        return packed
