"""The model fingerprint: a digest of the contents of a model's files, not of their names.

Two folders with equal weights, config and overrides are the same model; a folder whose weights
change becomes another model. If the weights cannot be read, as in an object store, the digest
covers their address. Of a large weight file it covers the size, the tensor index and samples of
every tensor. Samples suffice because training changes tensors throughout, and hashing hundreds of
gigabytes at each start would take too long. Embeddings are hashed completely, because training may
change single rows of them. So are adapters, which are small.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import logging
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_tiered_kv.connector.identity.kernel_format import kv_format
from vllm_tiered_kv.connector.identity.model_settings import (
    canonical_text,
    draft_settings,
    settings,
)
from vllm_tiered_kv.connector.identity.shard import whole_model_spec
from vllm_tiered_kv.core.key import Fingerprint
from vllm_tiered_kv.errors import UnsupportedError
from vllm_tiered_kv.native.cpu import xxh3_64

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_NO_CONFIGS = frozenset(
    {
        # Keys contain token ids, so the tokenizer does not matter. vLLM downloads these files only
        # where it needs them: not on hosts without an API server, nor with --tokenizer.
        *("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json"),
        *("chat_template.json", "generation_config.json"),
        # Logs of a training.
        *("trainer_state.json", "all_results.json", "train_results.json", "eval_results.json"),
    }
)
_NEVER_LOADED = "original"  # a folder of weights in another format, which vLLM does not download
_LOADER_IGNORED = frozenset(
    {
        # Speed and credentials. vLLM sets the last three itself.
        *("enable_multithread_load", "num_threads", "enable_weights_track", "concurrency"),
        *("memory_limit", "distributed", "num_readers", "verify_hash", "encryption_keyfile"),
        *("s3_access_key_id", "s3_secret_access_key", "hf_config", "model_class", "dtype"),
    }
)
_SMALL_FILE = 1 << 20  # files up to this size are hashed completely
_SAMPLE = 4096
_CHUNK = 8 << 20  # read and hashed at a time
_TABLES = ("embed", "wte", "wpe")  # in names of tensors whose rows may be trained one by one
_MAX_TENSORS = 8192
_MAX_HEADER = 256 << 20
_CLOCK_SKEW_NS = 2_000_000_000  # how far a file server's clock may lag behind this host's


@dataclass(frozen=True)
class _LoadedModel:
    """What vLLM loads a model from: the engine's model, or its draft model."""

    model_config: ModelConfig
    load_config: LoadConfig


def fingerprint(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    tenant: str = "",
    portable_shards: int = 0,
) -> Fingerprint:
    """Returns everything that must be equal for two engines to share blocks. With
    `portable_shards`, the number of shards replaces the tensor-parallel size."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if portable_shards:
        specs = [whole_model_spec(spec, ranks) for spec in specs]
    return Fingerprint(
        model=model_digest(vllm_config),
        revision=str(model.revision or ""),
        dtype=str(model.dtype),
        quantization=str(model.quantization or ""),
        kv_dtype=str(vllm_config.cache_config.cache_dtype),
        layout=str(kv_cache_config.kv_cache_layout),
        kernels=kv_format(vllm_config),
        block_sizes=tuple(g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups),
        group_layers=tuple(
            (*group.layer_names, repr(spec))
            for group, spec in zip(kv_cache_config.kv_cache_groups, specs, strict=True)
        ),
        parallel={
            **({"shards": portable_shards} if portable_shards else {"tp": ranks}),
            "pp": parallel.pipeline_parallel_size,
            "dcp": parallel.decode_context_parallel_size,
            "pcp": parallel.prefill_context_parallel_size,
            **_interleave(vllm_config, kv_cache_config),
        },
        tenant=tenant,
    )


def _interleave(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Returns how many consecutive tokens a rank holds before those of the next one, with decode
    context parallelism. Before 0.33 vLLM settles this number only in its workers, so that it is
    settled here in a copy of the configuration."""
    if vllm_config.parallel_config.decode_context_parallel_size == 1:
        return {}
    settled = copy.copy(vllm_config)
    settled.parallel_config = copy.copy(vllm_config.parallel_config)
    adjust = settled.adjust_dcp_kv_cache_interleave_size
    takes_config = "kv_cache_config" in inspect.signature(adjust).parameters  # before 0.33
    adjust(kv_cache_config if takes_config else kv_cache_config.kv_cache_groups)
    return {"interleave": settled.parallel_config.cp_kv_cache_interleave_size}


def model_digest(vllm_config: VllmConfig) -> str:
    """Returns a digest of weights, config and all settings that change what they compute, including
    those of a draft model whose KV is cached too."""
    digest = hashlib.sha256()
    models = _loaded_models(vllm_config)
    for model in models:
        _add_model(digest, model, has_own_files=model is models[0] or _differ(model, models[0]))
    for setting, value in draft_settings(vllm_config):
        _add(digest, setting, value)
    return digest.hexdigest()


def _loaded_models(vllm_config: VllmConfig) -> list[_LoadedModel]:
    """Returns the engine's model, and its draft model if that has KV."""
    models = [_LoadedModel(vllm_config.model_config, vllm_config.load_config)]
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.uses_draft_kv_cache():
        load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
        models.append(_LoadedModel(speculative.draft_model_config, load))
    return models


def _differ(draft: _LoadedModel, model: _LoadedModel) -> bool:
    """Whether a draft model has other files than the engine's model. MTP modules have the same."""
    return draft.load_config != model.load_config or any(
        getattr(draft.model_config, name, None) != getattr(model.model_config, name, None)
        for name in ("model", "revision", "model_weights")
    )


def _add_model(digest: Any, loaded: _LoadedModel, has_own_files: bool) -> None:
    model = loaded.model_config
    load_format = str(getattr(loaded.load_config, "load_format", "auto"))
    _add(digest, "load_format", load_format)
    _add(digest, "hf_config", _stable(model.hf_config.to_dict()))
    for setting, value in settings(model):
        _add(digest, setting, value)
    if load_format == "dummy":
        _add(digest, "seed", str(model.seed))
    elif has_own_files:
        _add(digest, "loader", _loader_text(loaded.load_config))
        _add_weights(digest, loaded)


def why_weights_are_unknown(vllm_config: VllmConfig) -> str | None:
    """Returns the vLLM option that lets others send weights to the workers at any time, without a
    notice to the connector, so that the files do not tell the weights; None if none is set."""
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return "weight_transfer_config"
    if getattr(vllm_config.parallel_config, "worker_extension_cls", ""):
        return "worker_extension_cls"
    return None


def changed_since_start(vllm_config: VllmConfig) -> Path | None:
    """Returns a model file, its folder or a link to it that has changed since this process started;
    None if there is none.

    vLLM's workers read the weights after that start and before the digest does. After a change in
    between, the digest may belong to other weights than the workers'. Call it after the digest.
    """
    changed = (_changed_file(model) for model in _loaded_models(vllm_config))
    return next((path for path in changed if path is not None), None)


def _changed_file(loaded: _LoadedModel) -> Path | None:
    if str(loaded.load_config.load_format) == "dummy":
        return None
    since = _process_start_ns() - _CLOCK_SKEW_NS
    model, source = loaded.model_config, _other_source(loaded)
    place = Path(source) if source else _model_folder(loaded)
    if place is None or not place.exists():
        return None
    refs = place.parent.parent / "refs"
    if not source and not Path(model.model).exists() and refs.is_dir():
        # A hub's files are named by their content and never change; they may be new because a
        # worker downloaded them. But of several snapshots, the ref tells which one was loaded.
        is_only_one = len(list(place.parent.iterdir())) == 1
        candidates = [] if is_only_one else [refs / str(model.revision or "main")]
    else:
        suffixes = (".json", ".py", *_WEIGHT_SUFFIXES)
        files = [place] if place.is_file() else _files(place)
        files = [file for file in files if file == place or file.suffix in suffixes]
        candidates = [link for file in files for link in _link_chain(file)]
        folders = {place, *(file.parent for file in files)} if place.is_dir() else ()
        candidates += [folder.resolve() for folder in folders]
    return next((path for path in candidates if _changed_ns(path) > since), None)


def _link_chain(path: Path) -> Iterator[Path]:
    """Yields all symbolic links that lead to a file, and the file itself."""
    path = Path(os.path.abspath(path))
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            yield part
            yield from _link_chain(part.parent / part.readlink() / path.relative_to(part))
            return
    yield path


def _changed_ns(path: Path) -> int:
    """Returns the later of mtime and ctime: copying or unpacking may set mtime, but not ctime."""
    try:
        stat = path.lstat()
    except FileNotFoundError:
        return 0
    return max(stat.st_mtime_ns, stat.st_ctime_ns)


def _process_start_ns() -> int:
    """Returns when this process started, by the clock of file times. An engine process starts just
    before its workers do."""
    stat_fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(stat_fields[19]) / os.sysconf("SC_CLK_TCK")  # seconds after boot
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return time.time_ns() - int(age * 1e9)


def _add_weights(digest: Any, loaded: _LoadedModel) -> None:
    """Adds the contents of the weight files, or their address if they are not on this host."""
    model, load_format = loaded.model_config, str(loaded.load_config.load_format)
    # These formats read other files even if there are safetensors.
    every_format = load_format in ("pt", "npcache")
    code = (".py",) if getattr(model, "trust_remote_code", False) else ()
    folder = _model_folder(loaded)
    source = _other_source(loaded)
    ignored = _NO_CONFIGS if not source else frozenset()  # without weights every file counts
    if ignored and getattr(model, "multimodal_config", None) is None:
        ignored |= {"tokenizer_config.json"}  # with media it may name their processor
    are_read = folder is not None and _add_place(digest, folder, every_format, code, ignored)
    if source:  # then the folder has only configs, or weights that vLLM does not load
        are_read = os.path.exists(source) and _add_place(digest, Path(source), every_format)
    if not are_read:
        name = source or model.model
        logger.warning(
            "cannot read the weight files of model %s on this host; its cache is keyed by name and "
            "revision, so call reset_prefix_cache(reset_connector=True) after changing them in "
            "place",
            name,
        )
        _add(digest, "name", f"{name}@{model.revision}")


def _other_source(loaded: _LoadedModel) -> str:
    """Returns the address of the weights if they are not in the model's folder, else "".

    For a model in an object store, vLLM's model folder is a temporary one without weights.
    """
    load = loaded.load_config
    if str(load.load_format) == "tensorizer":
        options = _loader_options(load)
        folder = options.get("tensorizer_dir")
        uri = options.get("tensorizer_uri") or (folder and f"{folder}/model.tensors")
        if uri:
            return str(uri)
    return str(getattr(loaded.model_config, "model_weights", None) or "")


def _loader_options(load: LoadConfig) -> dict[str, Any]:
    extra = getattr(load, "model_loader_extra_config", None) or {}
    return dict(extra.get("tensorizer_config") or extra)


def _loader_text(load: LoadConfig) -> str:
    ignored = set(_LOADER_IGNORED)
    if str(load.load_format) == "tensorizer":
        ignored |= {"tensorizer_uri", "tensorizer_dir"}  # see `_other_source`
    options = {
        name: value
        for name, value in _loader_options(load).items()
        if name not in ignored and not name.startswith("_") and value not in (None, {})
    }
    return canonical_text(options)


def adapter_digest(name: str, path: str) -> bytes:
    """Returns a digest of a LoRA adapter's files; it is cached until a file may have changed.

    It covers the top level of the adapter's folder: vLLM reads no other files.
    """
    folder = _adapter_folder(name, path)
    if folder is None:
        raise UnsupportedError(
            f"adapter {name!r} is not found at {path} on the scheduler's host, so its contents "
            "cannot be identified; give the path of a folder on this host"
        )
    # Size and mtime are not enough: adapters of one kind have the same size, and unpacking or
    # copying may set mtime. Only the kernel sets ctime.
    stamps = tuple(
        (file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        for file in _adapter_files(folder)
        for stat in [file.stat()]
    )
    return _adapter_digest(folder, stamps)


@lru_cache(maxsize=1024)
def _adapter_digest(folder: Path, stamps: tuple[tuple[str | int, ...], ...]) -> bytes:
    digest = hashlib.sha256(b"adapter files\0")
    for file in _adapter_files(folder):
        _add(digest, "file", file.name)
        _add_file(digest, file, whole=True)
    return digest.digest()


def _adapter_files(folder: Path) -> list[Path]:
    """Returns the files that decide what the adapter computes. It leaves out the tokenizer and the
    state of a training, which is many times as large."""
    ignored = {*_NO_WEIGHTS, *_NO_CONFIGS, "tokenizer_config.json"}
    return [
        file
        for file in _top_files(folder)
        if file.suffix in (".json", *_WEIGHT_SUFFIXES)
        and file.name not in ignored
        and not file.name.startswith("rng_state")
    ]


def _adapter_folder(name: str, path: str) -> Path | None:
    """Returns the folder from which vLLM's workers load the adapter; None if it is not here yet."""
    local = Path(os.path.expanduser(path))
    is_local = local.is_absolute() or local.exists()
    found = local if is_local else _snapshot(path)
    if found is not None and not is_local and _hub_is_asked():
        raise UnsupportedError(
            f"vLLM asks a hub for adapter {name!r} whenever it loads it, and may get a newer "
            "version than the local one; give the path of a folder, or set HF_HUB_OFFLINE=1"
        )
    if found is None or not found.is_dir():
        return None
    return found if any(file.stem == "adapter_model" for file in _top_files(found)) else None


def _hub_is_asked() -> bool:
    """Whether vLLM asks a hub for a newer version than the one on this host."""
    from vllm import envs

    if envs.VLLM_USE_MODELSCOPE:
        return True
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE


def _model_folder(loaded: _LoadedModel) -> Path | None:
    model = loaded.model_config
    local = Path(model.model)
    if local.exists():
        return local
    return _snapshot(model.model, model.revision, loaded.load_config.download_dir)


def _snapshot(
    repository: str, revision: str | None = None, cache: str | None = None
) -> Path | None:
    """Returns the folder of a hub repository's files on this host; None if they are not here."""
    try:
        from vllm import envs

        if envs.VLLM_USE_MODELSCOPE:
            # This hub may have another model under the same name. Like vLLM, use the default cache
            # folder of its library.
            from modelscope.hub.snapshot_download import snapshot_download as from_modelscope

            return Path(from_modelscope(repository, revision=revision, local_files_only=True))
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(repository, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except Exception as reason:  # after any failure there are no files to read
        logger.debug("no local snapshot of %s: %s", repository, reason)
        return None


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _top_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def _add_place(
    digest: Any,
    place: Path,
    every_format: bool = False,
    code: tuple[str, ...] = (),
    ignored: frozenset[str] = frozenset(),
) -> bool:
    """Adds a file, or a folder's configs and weights; False if the folder has no weights."""
    if place.is_file():
        _add_file(digest, place)
        return True
    suffixes = (".json", *code, *_WEIGHT_SUFFIXES)
    files = [file for file in _files(place) if file.suffix in suffixes and file.name not in ignored]
    files = [file for file in files if file != place / "config.json"]  # covered by hf_config
    files = [file for file in files if place / _NEVER_LOADED not in file.parents]
    # Some repositories contain the weights twice. vLLM prefers safetensors, but only those at the
    # top level: those of a subfolder do not replace the model's own weights.
    own = any(file.suffix == ".safetensors" and file.parent == place for file in files)
    if own and not every_format:
        files = [file for file in files if file.suffix in (".json", *code, ".safetensors")]
    for file in files:
        _add(digest, "file", file.relative_to(place).as_posix())
        _add_file(digest, file)
    return any(file.suffix in _WEIGHT_SUFFIXES and file.name not in _NO_WEIGHTS for file in files)


def _add_file(digest: Any, file: Path, whole: bool = False) -> None:
    size = file.stat().st_size
    _add(digest, "size", str(size))
    with file.open("rb") as stream:
        if size <= _SMALL_FILE:
            digest.update(stream.read())
            return
        ranges = [(0, size)] if whole else _sampled_ranges(stream, size, file.suffix)
        for offset, length in ranges:
            _add_range(digest, stream, offset, length)


def _add_range(digest: Any, stream: Any, offset: int, length: int) -> None:
    stream.seek(offset)
    if length <= _SAMPLE:
        digest.update(stream.read(length))
        return
    while length > 0:
        part = stream.read(min(length, _CHUNK))
        if not part:
            return
        digest.update(xxh3_64(part).to_bytes(8, "little"))  # ten times as fast as SHA-256
        length -= len(part)


def _sampled_ranges(stream: Any, size: int, suffix: str) -> Iterator[tuple[int, int]]:
    """Yields the ranges to hash. In a safetensors file: the index, and the start, middle and end of
    each tensor, or all of a small or embedding tensor. In other files: evenly spaced pieces."""
    index = _tensor_index(stream, size) if suffix == ".safetensors" else None
    if index is None:
        pieces = 1024
        for piece in range(pieces):
            yield piece * (size - _SAMPLE) // (pieces - 1), _SAMPLE
        return
    data, spans = index
    yield 0, data
    step = max(1, len(spans) // _MAX_TENSORS)
    for number, (start, end, is_table) in enumerate(spans):
        if is_table or end - start <= 3 * _SAMPLE:
            yield data + start, end - start
        elif number % step == 0:
            for at in (start, (start + end - _SAMPLE) // 2, end - _SAMPLE):
                yield data + at, _SAMPLE


def _tensor_index(stream: Any, size: int) -> tuple[int, list[tuple[int, int, bool]]] | None:
    """Returns where the data of a safetensors file starts, and (start, end, is embedding) of each
    tensor; None if the file is broken, which vLLM reports."""
    (header_bytes,) = struct.unpack("<Q", stream.read(8))
    data = 8 + header_bytes
    if data > min(size, _MAX_HEADER):
        return None
    try:
        header = json.loads(stream.read(header_bytes))
        spans = []
        for name in header:
            if name != "__metadata__":
                start, end = header[name]["data_offsets"]
                is_table = any(word in name.lower() for word in _TABLES)
                spans.append((int(start), int(end), is_table))
        spans.sort()
    except Exception as reason:  # a broken header fails in many ways
        logger.debug("cannot parse the tensor index of a weight file: %s", reason)
        return None
    if any(not 0 <= start <= end <= size - data for start, end, _ in spans):
        return None
    return data, spans


def _add(digest: Any, label: str, value: str) -> None:
    digest.update(f"{label}:{len(value)}:{value};".encode())


def _stable(config: dict[str, Any]) -> str:
    """Returns the canonical text of a config, without where and by which library it was saved."""
    ignored = {"_name_or_path", "transformers_version", "_commit_hash"}
    kept = {key: value for key, value in config.items() if key not in ignored}
    inner = kept.get("model")
    if isinstance(inner, dict):  # vLLM wraps the config of an EAGLE head
        kept["model"] = {key: value for key, value in inner.items() if key not in ignored}
    return json.dumps(kept, sort_keys=True, default=canonical_text)
