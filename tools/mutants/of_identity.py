"""Which model computed a block: `connector/model_identity.py`, `connector/model_settings.py`; and
which are left alone: `connector/support.py`."""

from __future__ import annotations

from tools.mutants.mutation import Mutation, Needs

_IDENTITY = ("tests/unit/test_model_identity.py",)
_SOURCES = ("tests/unit/test_weight_sources.py",)
_NAMESPACE = ("tests/engine/test_namespace.py",)
_SETTINGS = ("tests/engine/test_model_settings.py",)
_EVERY_TOKEN = (
    "tests/engine/test_support_engine.py::"
    "test_engines_that_need_a_forward_of_every_token_are_left_alone",
)

IDENTITY = (
    Mutation(
        "embedding-sampled",
        "connector/model_identity.py",
        "if is_table or end - start <= 3 * _SAMPLE:",
        "if end - start <= 3 * _SAMPLE:",
        "a model whose new tokens were trained is taken for the one before",
        _IDENTITY,
    ),
    Mutation(
        "long-rope-by-config-alone",
        "connector/model_settings.py",
        'yield "long_rope", str(model.max_model_len > int(original or 0))',
        'yield "long_rope", ""',
        "engines with other factors of their positions share blocks",
        _IDENTITY,
    ),
    Mutation(
        "folder-without-weights-is-a-model",
        "connector/model_identity.py",
        "    if not are_read:\n",
        "    if folder is None:\n",
        "fine-tunes in an object store share blocks",
        _SOURCES,
    ),
    Mutation(
        "weights-of-a-trainer",
        "connector/assembly.py",
        "    if unknown is not None:\n        key_maker.new_epoch(os.urandom(16))\n",
        "    if unknown is not None:\n",
        "trainings that share a daemon share blocks",
        _NAMESPACE,
        Needs.VLLM,
    ),
    Mutation(
        "weights-replaced-while-loading",
        "connector/assembly.py",
        "    if changed is not None:\n        key_maker.new_epoch(os.urandom(16))\n",
        "    if changed is not None:\n",
        "blocks of old weights are kept under the name of those that replaced them",
        _NAMESPACE,
        Needs.VLLM,
    ),
    Mutation(
        "other-bits",
        "connector/kv_format.py",
        "    if envs.VLLM_BATCH_INVARIANT:\n",
        "    if False:\n",
        "an engine that promises the same bits loads others",
        _NAMESPACE,
        Needs.VLLM,
    ),
    Mutation(
        "loader-told-nothing-that-counts",
        "connector/model_identity.py",
        '_add(digest, "loader", _loader_text(vllm_config.load_config))',
        "pass",
        "weights that a loader finds by its options share blocks",
        _SOURCES,
    ),
    Mutation(
        "kernels-of-another-release",
        "connector/kv_format.py",
        "facts = [f\"vLLM {vllm.__version__.partition('+')[0]}\", device]",
        "facts = [device]",
        "blocks that another release of vLLM packed are read as this one packs them",
        _NAMESPACE,
        Needs.VLLM,
    ),
    Mutation(
        "kernels-of-another-cpu",
        "connector/kv_format.py",
        "facts += [platform.machine(), *sorted(_instructions())]",
        "pass",
        "hosts with other matrix units read each other's packed keys",
        _NAMESPACE,
        Needs.VLLM,
    ),
    Mutation(
        "cut-blocks-sent-to-daemons",
        "connector/worker_half.py",
        "        if self._config.remote:\n            require_whole",
        "        if not self._config:\n            require_whole",
        "back-ends that cut blocks differently read each other's",
        ("tests/engine/test_worker_half.py",),
        Needs.VLLM,
    ),
    Mutation(
        "adapter-settings-ignored",
        "connector/model_settings.py",
        'return "" if lora is None else',
        'return "" if True else',
        "engines that apply an adapter to other modules share its blocks",
        _SETTINGS,
        Needs.VLLM,
    ),
    Mutation(
        "config-in-the-order-of-hashing",
        "connector/model_identity.py",
        "default=canonical_text)",
        "default=str)",
        "a model whose config holds a set finds nothing after a restart",
        _SETTINGS,
        Needs.VLLM,
    ),
    Mutation(
        "settings-by-address",
        "connector/model_settings.py",
        '_ADDRESS.sub("", repr(value))',
        "repr(value)",
        "an engine finds nothing of what it stored before a restart",
        _SETTINGS,
        Needs.VLLM,
    ),
    Mutation(
        "media-settings-ignored",
        "connector/model_settings.py",
        "        yield from _counted(media,",
        "        yield from () and _counted(media,",
        "engines that prune videos share blocks with those that do not",
        _SETTINGS,
        Needs.VLLM,
    ),
    Mutation(
        "adapter-changed-in-place-not-seen",
        "connector/model_identity.py",
        "        (file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)\n",
        "        (file.name, 0, 0)\n",
        "an adapter gets blocks computed with its older version",
        ("tests/unit/test_adapter_identity.py",),
    ),
    Mutation(
        "pooling-of-a-part",
        "connector/support.py",
        '        return "its pooling (MEAN, CLS or by steps) takes the outputs of all tokens"\n',
        "        pass\n",
        "a hit for a model that pools all tokens ends the engine",
        _EVERY_TOKEN,
        Needs.VLLM,
    ),
    Mutation(
        "experts-of-a-part",
        "connector/support.py",
        '        return "the routed experts of all tokens are asked for"\n',
        "        pass\n",
        "a hit whose routed experts vLLM no longer has ends the engine",
        _EVERY_TOKEN,
        Needs.VLLM,
    ),
    Mutation(
        "steps-that-failed",
        "connector/support.py",
        'if getattr(parallel, "enable_fault_tolerance", False):',
        "if False:",
        "what a failed step computed is stored, and what it reported is waited for for ever",
        ("tests/engine/test_support_engine.py::test_other_engines_are_left_alone",),
        Needs.VLLM,
    ),
)
