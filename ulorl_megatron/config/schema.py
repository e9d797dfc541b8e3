"""The typed configuration: one dataclass a section, units in the docstrings, no key that does nothing.

Values that need more than a type are checked in `validate.py`. Source of the defaults: UloRL (arXiv 2507.19766),
section 4, where it gives one.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, List, Optional

from omegaconf import MISSING


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Importance(Enum):
    """Old policy of the ratio: start of this step (pois), generator of the segment (sais), one segment only (tois)."""

    pois = "pois"
    sais = "sais"
    tois = "tois"


class Release(Enum):
    """When a finished sample may train: with its group half done (sample), or only with all of it (group)."""

    sample = "sample"
    group = "group"


class Stop(Enum):
    """When a step's decoding ends: every sample has its segment (segment), or enough samples are complete (enough)."""

    segment = "segment"
    enough = "enough"


class DmmptMode(Enum):
    """Masking of mastered positive tokens: never, always, or while the entropy is below sigma (the paper's DMMPTs)."""

    off = "off"
    always = "always"
    dynamic = "dynamic"


class EntropyScope(Enum):
    sample = "sample"
    batch = "batch"


class Distribution(Enum):
    """Temperature at which p and H of the mastered-token test are taken: the sampling one, or 1."""

    tempered = "tempered"
    raw = "raw"


class TransformerImpl(Enum):
    """Layer implementation: plain torch (any device) or Transformer Engine (GPU)."""

    local = "local"
    te = "te"


class Recompute(Enum):
    none = "none"
    selective = "selective"
    full = "full"


class Schedule(Enum):
    """Learning rate after the warm-up: constant, or along half a cosine to min_lr."""

    constant = "constant"
    cosine = "cosine"


class WeightSyncKind(Enum):
    """How servers get weights: from an HF folder on a disk they share with the trainer, or by broadcast."""

    disk = "disk"
    distributed = "distributed"


class VerifierKind(Enum):
    """Who judges: a rule (Math-Verify), a language model (generative), or the model where the rule denies (hybrid)."""

    rule = "rule"
    generative = "generative"
    hybrid = "hybrid"


class Overlong(Enum):
    """What a response cut at rollout.global_max_length is worth: reward 0 (zero), or nothing: it leaves untrained
    (filter). soft: 0, and the rewards of long responses are lowered (DAPO, arXiv 2503.14476, Eq. 13)."""

    zero = "zero"
    filter = "filter"
    soft = "soft"


@dataclass
class RunConfig:
    """The run as a whole.

    dir: run directory; the same directory again resumes the run.
    seed: seeds data order, initialisation of anything random, and the servers.
    total_steps: steps of the loop (one policy update each, unless nothing was released).
    processes: trainer ranks. All are started on this machine, unless torchrun or Slurm starts them: then theirs count.
    """

    dir: str = MISSING
    seed: int = 0
    total_steps: int = 300
    processes: int = 1


@dataclass
class ModelConfig:
    """path: HF directory (config.json, *.safetensors, tokenizer). dtype: of trainer and servers alike.

    max_positions: tokens a sequence may have, in place of config.json's max_position_embeddings; nothing is scaled.
    yarn_factor, yarn_original: scale the rotary embedding by YaRN from yarn_original to factor times as many positions.
    Trainer, servers and exported weights take these three alike; null: what config.json says.
    """

    path: str = MISSING
    dtype: Dtype = Dtype.bfloat16
    max_positions: Optional[int] = None
    yarn_factor: Optional[float] = None
    yarn_original: Optional[int] = None


@dataclass
class DataConfig:
    """train, eval: JSONL or Parquet files, one {"prompt": str | messages, "answer": str} a row.

    eval may also be several, as {name: file}; the names stand in the names of the metrics.

    max_prompt_length: tokens, after the chat template; a longer prompt is an error that names its line.
    """

    train: str = MISSING
    eval: Any = None
    max_prompt_length: int = 2048


@dataclass
class RolloutConfig:
    """Segment decoding.

    global_max_length: response tokens a sample may ever have. segment_count: segments it is decoded in.
    prompts_per_step x group_size: samples in flight in one step, unfinished ones included.
    temperature, top_p, top_k: sampling; training needs top_p 1 and top_k -1 (log-probs are not renormalised).
    request_timeout_s: seconds one segment may take before it is asked again. request_retries: how often.
    stop: see Stop. enough_samples: complete samples that end a step's decoding with stop enough; the others keep what
    they have. overlap: the next step decodes while the policy trains, and goes on under the new weights as it is.
    """

    global_max_length: int = 131072
    segment_count: int = 8
    prompts_per_step: int = 128
    group_size: int = 8
    temperature: float = 0.85
    top_p: float = 1.0
    top_k: int = -1
    request_timeout_s: float = 3600.0
    request_retries: int = 3
    stop: Stop = Stop.segment
    enough_samples: int = 0
    overlap: bool = False


@dataclass
class ServersConfig:
    """SGLang servers.

    urls: running servers to use. announced: how many `ulorl serve` are waited for, up to start_timeout_s, on machines
    that share run.dir. Without either `count` servers are started on this machine, and stopped at the end.
    port: first port of the started ones; 0 takes free ones. start_timeout_s: seconds until a server must be ready.
    hang_timeout_s: seconds a server may leave the question for its health unanswered before it counts as hung.
    max_restarts: how often one that died, hung or answered garbage is started again (one of another process: taken back
    once it answers), counted for each server from the start of the command. extra_args: further flags of
    sglang.launch_server, as they are.
    weight_sync: see WeightSyncKind. verify_weights_every: versions between two comparisons of the checksums of what the
    servers hold with ours (CPU servers), or with each other (GPU servers); 0: never.
    """

    urls: List[str] = field(default_factory=list)
    announced: int = 0
    count: int = 1
    port: int = 0
    start_timeout_s: float = 600.0
    hang_timeout_s: float = 120.0
    max_restarts: int = 3
    weight_sync: WeightSyncKind = WeightSyncKind.disk
    verify_weights_every: int = 0
    extra_args: List[str] = field(default_factory=list)


@dataclass
class JudgeConfig:
    """The language model of verifier.kind generative and hybrid, behind any OpenAI-compatible URL (SGLang has one).

    url: base URL, up to and with /v1. model: its name there; null: the first that url/models lists. key_variable:
    environment variable with the key for the URL; null: no key. template: file with the prompt; null: the packaged one.
    votes: replies asked for each answer; their majority decides, and without one the verdict is unknown. temperature:
    of the replies. max_tokens: of one reply, thinking included. concurrency: requests at a time. timeout_s: seconds for
    one. retries: further tries of a request that fails while others are answered. hold_s: seconds the run waits for a
    judge that answers nobody, before it stops. cache_size: verdicts kept in memory.
    """

    url: Optional[str] = None
    model: Optional[str] = None
    key_variable: Optional[str] = None
    template: Optional[str] = None
    votes: int = 1
    temperature: float = 0.0
    max_tokens: int = 2048
    concurrency: int = 64
    timeout_s: float = 300.0
    retries: int = 3
    hold_s: float = 3600.0
    cache_size: int = 100000


@dataclass
class VerifierConfig:
    """kind: see VerifierKind. workers: judging processes of the rule. timeout_s: seconds for one answer, then its
    worker is killed. retries: further tries of an answer whose worker failed; after them the sample is failed, not
    wrong. judge: see JudgeConfig."""

    kind: VerifierKind = VerifierKind.rule
    workers: int = 4
    timeout_s: float = 10.0
    retries: int = 2
    judge: JudgeConfig = field(default_factory=JudgeConfig)


@dataclass
class ExperienceConfig:
    """release: see Release. dynamic_sampling: drop groups whose verdicts are all equal (they carry no gradient).

    overlong: see Overlong. overlong_cache: last tokens before rollout.global_max_length over which overlong soft
    lowers the reward, from by 0 to by 1.
    """

    release: Release = Release.sample
    dynamic_sampling: bool = True
    overlong: Overlong = Overlong.zero
    overlong_cache: int = 0


@dataclass
class AlgorithmConfig:
    """importance: see Importance (Eq. 8). clip_low, clip_high: the ratio is clipped to [1 - low, 1 + high] (Eq. 7).

    max_engine_mismatch: the run stops when the mean |log-prob(trainer) - log-prob(server)| over the last segments of
    a step is above it (nats); null: only logged. 1e-4 holds in float32; bfloat16 is naturally above it.
    tis_cap: truncated importance sampling: tokens weigh min(p at the step's start / p when sampled, cap); null: off.
    pois_kl_warning: KL (nats a token) of the policy from that of old segments above which pois is warned of.
    """

    importance: Importance = Importance.pois
    clip_low: float = 0.2
    clip_high: float = 0.2
    max_engine_mismatch: Optional[float] = None
    tis_cap: Optional[float] = None
    pois_kl_warning: float = 0.05


@dataclass
class DmmptConfig:
    """Dynamic masking of well-mastered positive tokens (Eq. 9-10).

    tau: probability from which a token is mastered. sigma: entropy (nats) below which masking sets in.
    entropy_scope: entropy of the sample (as printed) or of the whole batch. distribution: see Distribution.
    """

    mode: DmmptMode = DmmptMode.dynamic
    tau: float = 0.99
    sigma: float = 0.2
    entropy_scope: EntropyScope = EntropyScope.sample
    distribution: Distribution = Distribution.tempered


@dataclass
class ParallelConfig:
    """Sizes of Megatron's dimensions. Sequence parallelism is on whenever tensor > 1. Data parallelism is the rest.

    virtual_pipeline: model chunks a pipeline rank holds (interleaved schedule); 1 turns it off.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1


@dataclass
class OptimizerConfig:
    """AdamW. Steps are counted in updates: a step of the run without an update does not count.

    lr: reached linearly in warmup_steps updates. schedule: see Schedule; cosine arrives at min_lr in update number
    decay_steps, the warm-up included, and stays there. clip_grad: global norm; 0 turns it off. offload: keep Adam's two
    moments in host memory, 8 bytes a parameter; every update moves them to the GPU and back.
    """

    lr: float = 1e-6
    schedule: Schedule = Schedule.constant
    warmup_steps: int = 0
    decay_steps: int = 0
    min_lr: float = 0.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    offload: bool = False


@dataclass
class OverlapConfig:
    """What data parallelism sends while computation goes on; the results are the same.

    grad_reduce: gradients are summed over the ranks during the last micro-batch's backward pass, in buckets.
    param_gather: updated weights are gathered during the next forward pass; saves time between the updates of one step
    only (updates_per_step), since the servers need all of them after the last.
    """

    grad_reduce: bool = False
    param_gather: bool = False


@dataclass
class PolicyConfig:
    """The Megatron-Core trainer.

    max_tokens_per_rank: tokens of one packed micro-batch on one context-parallel rank; a longer sample gets a
    micro-batch of its own. head_chunk_tokens: tokens whose logits exist at a time. updates_per_step: optimizer steps
    the samples of one step are split into. recompute: activation recomputation in the backward pass.
    """

    transformer_impl: TransformerImpl = TransformerImpl.local
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    max_tokens_per_rank: int = 16384
    head_chunk_tokens: int = 1024
    updates_per_step: int = 1
    recompute: Recompute = Recompute.none
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class CheckpointConfig:
    """every: steps between checkpoints of model, optimizer and pools. keep_last: how many stay on disk.

    asynchronous: written while training goes on, from a copy in host memory; false: training waits. keep_weights: HF
    copies of the weights of past steps that stay in weights/.
    """

    every: int = 1
    keep_last: int = 2
    asynchronous: bool = True
    keep_weights: int = 2


@dataclass
class EvaluationConfig:
    """avg@k on data.eval. every: steps between evaluations (before the first and after the last step always);
    0 turns them off. samples_per_prompt: the k. max_prompts: the first so many problems; 0 is all of them."""

    every: int = 0
    samples_per_prompt: int = 32
    max_prompts: int = 0
    temperature: float = 0.85
    top_p: float = 0.95
    top_k: int = 20


@dataclass
class Config:
    """Everything `ulorl train` reads."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    experience: ExperienceConfig = field(default_factory=ExperienceConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    dmmpt: DmmptConfig = field(default_factory=DmmptConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
