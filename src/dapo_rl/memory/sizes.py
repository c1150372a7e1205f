"""The bytes that the parts of a run take, while it samples and while it updates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dapo_rl.choices import REWARD_MODEL, is_reward_model
from dapo_rl.config import Config
from dapo_rl.engine_specs import engine_spec
from dapo_rl.engines.native.kv_cache import KEPT_ID_BYTES, PAGE_TOKENS
from dapo_rl.errors import UserError
from dapo_rl.memory.model_size import ModelSize, classifier_parameters, size_of
from dapo_rl.models.chunked_lm_head import CHUNK_ELEMENTS

RUNTIME = 1 << 30
"""The CUDA context, kernels and workspaces; on a CPU, Python and its libraries."""
USABLE = 0.95
"""The share of the memory that a run can use; the rest is lost to fragmentation."""
MAX_SEQUENCES = 1024
PREFILL_TOKENS = 32768
"""Tokens that the native engine computes at once before it decodes."""

STATE = {
    "weights": "weights",
    "gradients": "gradients",
    "moments": "optimizer",
    "reference": "reference model",
    "critic": "critic",
}
"""The fields of RunSizes that ranks divide among them, and their names in reports."""


@dataclass(frozen=True, slots=True)
class RunSizes:
    gpu: int
    """Bytes that the run may use, of a GPU or a host."""
    weights: int
    gradients: int
    moments: int
    engine: int
    """The engine's own weights."""
    reference: int
    casts: int
    """bfloat16 copies of the weights, which autograd keeps for the backward pass unless layers are recomputed."""
    layer_casts: int
    """Those of one layer: all that exist at a time if layers are recomputed."""
    head: int
    """The output layer's working memory: a chunk of logits, a bfloat16 copy of its weight, and its gradient."""
    token: int
    """Activations per token of a micro-batch."""
    recomputed_token: int
    """The same if layers are recomputed."""
    layer_token: int
    """Activations of one layer per token: all that exist at a time if layers are recomputed."""
    graphs: int
    """Memory of captured graphs, which is never released: the logits of one decoding step."""
    prefill: int
    """Activations of a prefill."""
    kv_token: int
    """Bytes per token in the cache; 0 if the engine's share already contains it."""
    longest: int
    """Tokens of the longest possible sample."""
    update_tokens: int
    """Tokens of a whole update."""
    sequences: int
    """Most sequences that the engine generates at once."""
    kv_setting: int | None = None
    """The cache as the user sets it."""
    kept_token: int = 0
    """Bytes for each token of the longest length, in the cache's memory, of the ids that truncation kept."""
    critic: int = 0
    """Weights, gradients and moments of a critic, which is never trained at the same time as the policy."""
    teacher: int = 0
    """The part of the reference model that is on the host in turns, unless it scores, when there are no gradients."""
    reward: int = 0
    """Weights of reward models, which are moved to the host during updates in turns."""

    @property
    def lora(self) -> bool:
        return self.gradients < self.weights

    @property
    def usable(self) -> int:
        return int(USABLE * self.gpu)

    @property
    def state(self) -> dict[str, int]:
        """The parts that ranks divide among them, by their names in reports."""
        return {name: getattr(self, field) for field, name in STATE.items()}

    def divided(self, ranks: int) -> RunSizes:
        """The sizes of one of several ranks, before anything is gathered."""
        return replace(self, teacher=0, **{field: getattr(self, field) // ranks for field in STATE})

    def without_state(self) -> RunSizes:
        return replace(self, teacher=0, **dict.fromkeys(STATE, 0))

    @property
    def kv_least(self) -> int:
        return self._sequences(1) if self.kv_setting is None else self.kv_setting

    @property
    def kv_most(self) -> int:
        return self._sequences(self.sequences) if self.kv_setting is None else self.kv_setting

    @property
    def kv_default(self) -> int:
        """A third of what is free once the weights are loaded, as the native engine takes it."""
        if self.kv_setting is not None:
            return self.kv_setting
        return min(self.kv_most, max(self.gpu - RUNTIME - self.weights - self.engine, 0) // 3)

    def without_engine(self) -> RunSizes:
        """The sizes of updates alone."""
        return replace(self, engine=0, graphs=0, prefill=0, kv_token=0, kept_token=0, kv_setting=None)

    def sampling(self, kv: int) -> int:
        """While sampling in turns: without gradients and activations."""
        return self._always - self.teacher + self.reward + self.engine + self.prefill + kv

    def updating(self, tokens: int, recompute: bool) -> int:
        """While updating in turns, with micro-batches of so many tokens: without the engine's weights and cache."""
        return self._always - self.teacher_or_gradients + self.gradients + self.working(tokens, recompute)

    def keeping(self, kv: int, tokens: int, recompute: bool) -> int:
        """If everything stays in memory."""
        work = max(self.prefill, self.working(tokens, recompute))
        return self._always + self.reward + self.gradients + self.engine + kv + work

    @property
    def teacher_or_gradients(self) -> int:
        """What a teacher and the gradients never take at the same time, in turns."""
        return min(self.teacher, self.gradients)

    def working(self, tokens: int, recompute: bool) -> int:
        """Activations, copies of weights and the output layer's memory. At the end of the forward pass there is a chunk
        of logits; in the backward pass one layer, if it is recomputed."""
        if recompute:
            return tokens * self.recomputed_token + max(self.head, self.layer_casts + tokens * self.layer_token)
        return tokens * self.token + self.casts + self.head

    def tokens_in(self, nbytes: int, recompute: bool) -> int:
        """The most tokens whose `working` memory is at most this."""
        if recompute:
            by_layer = (nbytes - self.layer_casts) // (self.recomputed_token + self.layer_token)
            return min((nbytes - self.head) // self.recomputed_token, by_layer)
        return (nbytes - self.casts - self.head) // self.token

    @property
    def _always(self) -> int:
        return RUNTIME + self.weights + self.moments + self.reference + self.critic + self.graphs

    def _sequences(self, count: int) -> int:
        """Pages for so many sequences of the longest length, and one for padding rows; kept ids for as many and one
        more."""
        capacity = -(-self.longest // PAGE_TOKENS) * PAGE_TOKENS
        kept = (count + 1) * capacity * self.kept_token
        return (count * capacity + PAGE_TOKENS) * self.kv_token + kept


def run_sizes(
    config: Config,
    size: ModelSize,
    memory: int,
    *,
    bfloat16: bool,
    longest: int | None = None,
    trained: int | None = None,
    on_cpu: bool = False,
) -> RunSizes:
    """The sizes of a run on a GPU, or a host, with so many bytes. `longest` is its longest sample, and `trained` the
    parameters that it trains; both follow from the settings unless they are given."""
    lora, spec = config.model.lora is not None, engine_spec(config.engine)
    native, reserves = spec.paged_cache, spec.gpu_share is not None
    sampling, vocabulary, moment = config.sampling, size.vocabulary, moment_bytes(config)
    trained = trained_parameters(config, size) if trained is None else trained
    ids = KEPT_ID_BYTES * sampling.most_kept
    kept = 12 * size.hidden + ids  # the last norm and the head
    # Padded samples go through the model's own head: all logits, in the compute type and three times in float32, and
    # once more with a mask if not all tokens are kept.
    logits = 0 if config.train.packed else (14 + 5 * sampling.keep_mask) * vocabulary
    width = 2 if bfloat16 else 4
    sequences = sampling.max_batch or MAX_SEQUENCES
    # On a CPU in float32, the native engine samples from the trained module, unless it has adapters.
    own = (width if native and (bfloat16 or not on_cpu) else 4 * lora) * size.parameters
    head = CHUNK_ELEMENTS["cuda"] * (10 if bfloat16 else 12) + 2 * size.head * bfloat16 + 4 * size.head * (not lora)
    if on_cpu:
        # Only the part of the cache that is written takes memory.
        sequences = min(sequences, int((1 + sampling.ahead) * sampling.prompts_per_step) * sampling.group_size)
        head = CHUNK_ELEMENTS["cpu"] * (10 if bfloat16 else 4)  # in float32, softmax works on small slices of a chunk
    kv = None if sampling.kv_memory_gib is None or not native else int(sampling.kv_memory_gib * 2**30)
    return RunSizes(
        gpu=memory,
        weights=4 * size.parameters,
        gradients=4 * trained,
        moments=moment * trained,
        engine=own if spec.gpu_share is None else int(spec.gpu_share * memory),
        reference=_reference_bytes(config, size),
        casts=2 * size.body * bfloat16,
        layer_casts=2 * size.body // size.layers * bfloat16,
        head=head,
        token=size.layers * size.layer_bytes(bfloat16) + kept + logits,
        recomputed_token=4 * size.layers * size.hidden + kept + logits,
        layer_token=size.layer_bytes(bfloat16),
        graphs=0 if on_cpu else 8 * vocabulary * sequences * native,
        prefill=0 if on_cpu else PREFILL_TOKENS * width * (3 * size.inner + 6 * size.hidden) * (not reserves),
        kv_token=2 * size.layers * size.keys * (4 if on_cpu else width) * (not reserves),
        longest=longest or config.longest_sample,
        update_tokens=update_tokens(config),
        sequences=sequences,
        kv_setting=kv,
        kept_token=ids * native,
        critic=(8 + moment) * size.parameters * config.has_critic,
        teacher=_reference_bytes(config, size) * config.teacher.loaded,
        reward=_reward_bytes(config, width, on_cpu),
    )


def _reward_bytes(config: Config, width: int, on_cpu: bool) -> int:
    """Of reward models on this device; a cluster's are in its driver."""
    if config.cluster.backend is not None and not on_cpu:
        return 0
    names = [entry.verifier for entry in config.reward.verifiers if is_reward_model(entry.verifier)]
    return sum(width * classifier_parameters(name.removeprefix(REWARD_MODEL)) for name in names)


def _reference_bytes(config: Config, size: ModelSize) -> int:
    """Of the frozen model in float32: a teacher, or the initial model, unless it is the base of the adapters."""
    if config.teacher.loaded:
        assert config.teacher.name is not None
        try:
            return 4 * size_of(config.teacher.name).parameters
        except UserError as error:
            raise UserError(f"teacher.name: {str(error).removeprefix('model.name: ')}") from None
    return 4 * size.parameters * (config.needs_reference and config.model.lora is None)


def trained_parameters(config: Config, size: ModelSize) -> int:
    return size.parameters if config.model.lora is None else size.adapter_parameters(config.model.lora)


def moment_bytes(config: Config) -> int:
    """Bytes of both moments per trained parameter."""
    return 2 if config.train.optimizer == "adamw_8bit" else 8


def update_tokens(config: Config) -> int:
    """The most tokens that one update trains on, unless carried groups make the batch larger; a prompt that a group
    shares is computed once."""
    sampling = config.sampling
    groups = sampling.prompts_per_step // config.train.mini_batches
    return groups * (config.data.max_prompt_tokens + sampling.group_size * sampling.max_new_tokens)
