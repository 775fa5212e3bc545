"""The messages between the two sides of a replica.

The front side (gRPC, registry, telemetry) puts commands on one queue, the engine side (weights, KV pool, leases,
scheduler) puts events on another. All messages are frozen values without torch types, so that the queues may join
threads or processes, and any engine that speaks them (real, mock, a production engine) stands behind the same services.

Life of a job, as commands (>) and events (<):

    local          > Generate(remote=False)   < Held  < Tokens…  < Ended
    remote         > Generate(remote=True)    < Held
                   > AttachLease  > PiecesReady…  > FirstTokenKnown     (in the order the prefill replica sent them)
                   < Pulled  > Verdict(valid=True)   < Tokens…  < Ended
    remote, lost   … > ReadLocally   or   > AttachLease (of the next alternate)
    prefill        > Prefill   < Granted  < PiecesFinal…  < FirstToken
    with a holder  > Prefill or local Generate (prefix_tokens > 0)  < Held (prefix_s is set)
                   > AttachLease (of the holder's prefix)  < Pulled  > Verdict    then as without; or > ReadLocally;
                   after < PullFailed or an invalid verdict the job goes on by itself
    any            > Cancel (answers nothing)   < Failed

Every job ends with exactly one of: Ended, Failed, FirstToken (prefill jobs), or the Cancel that the front sent.
Times named `*_at_s` are `time.monotonic()` seconds, which all processes of one Linux machine share.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from kvrelay.errors import KvrelayError
from kvrelay.types import FinishReason, KvLayout, ReplicaState, Sampling, TokenLogprobs, Usage

JobId: TypeAlias = str
CallId: TypeAlias = int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids and block keys of a request.

    Attributes:
        prompt_ids: packed u32.
        output_ids: packed u32; tokens already sent to the client, which follow the prompt.
        root_key: 16 bytes, root of the key chain.
        block_keys: 16 bytes a full block of prompt + output.
    """

    prompt_ids: bytes
    root_key: bytes
    block_keys: bytes
    output_ids: bytes = b""


@dataclass(frozen=True, slots=True)
class LeasedPage:
    """A page under lease: index in the owner's pool, its generation at grant, tokens of it that the lease covers."""

    page: int
    generation: int
    valid_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGrant:
    """A lease as its owner granted it; `pages` in sequence order, `first_position` that of the first page's token 0."""

    lease_id: str
    pages: tuple[LeasedPage, ...]
    first_position: int
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentInfo:
    """What a puller must know of an owner's memory (`HandshakeResponse` in kv_source.proto)."""

    replica_id: str
    incarnation: str
    agent_name: str
    agent_metadata: bytes
    base_address: int
    pages: int
    layout: KvLayout
    memory: str = "DRAM"
    device_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PullStats:
    """What one pull moved.

    Attributes:
        elapsed_s: from the first READ posted to the last one done; pieces wait for the owner to compute in it.
        busy_s: the part of it with READs under way: what a rate is counted by.
    """

    tokens: int
    pages: int
    bytes: int
    descriptors: int
    elapsed_s: float
    busy_s: float
    transport: str = ""


# ---------------------------------------------------------------- commands: front -> engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Write an answer. With `remote`, the KV of the prompt comes by AttachLease; until then the job pins its prefix.

    `prefix_tokens` of a local prompt are held by another replica; when they are more than are held here, the job waits
    for them by AttachLease, or for ReadLocally.
    """

    job_id: JobId
    prompt: Prompt
    sampling: Sampling
    forced_next: int | None = None
    remote: bool = False
    prefix_tokens: int = 0
    priority: int = 0
    deadline_at_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Read a prompt and lease its KV from `held_tokens` on. Fails as Unavailable when its lease ends before that.

    `prefix_tokens` as in Generate. Only a Prefill that waits for a prefix is answered by Held.
    """

    job_id: JobId
    prompt: Prompt
    sampling: Sampling
    forced_next: int | None = None
    held_tokens: int = 0
    prefix_tokens: int = 0
    priority: int = 0
    deadline_at_s: float = float("inf")
    lease_ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachLease:
    """The prompt's KV is leased at `source`; pull it as it becomes final. Replaces an earlier lease of the job.

    For a job that waits for a prefix: whole pages of that prefix, all final. They are pulled if there is room at once.
    """

    job_id: JobId
    lease: LeaseGrant
    source: AgentInfo
    prefill_cached_tokens: int = 0
    prefill_pulled_tokens: int = 0
    prefill_pulled_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecesReady:
    """The first `pages` pages of the job's lease are final; `all` when the whole lease is."""

    job_id: JobId
    lease_id: str
    pages: int
    all: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenKnown:
    """The prefill replica chose the first token and the front has passed it on: it is final.

    No token is told before it, even when the first token was forced. Answered by Ended if it completes the answer.
    """

    job_id: JobId
    token: int
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The owner's answer about a finished pull.

    Not valid: what was pulled is dropped and the job waits for orders. That is also how the front gives up on a lease
    whose prefill replica failed, at any time: the job then holds no room while the next one is asked.
    """

    job_id: JobId
    lease_id: str
    valid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLocally:
    """Give up on remote prefill, or on a prefix: drop the lease and what was pulled, read the prompt here."""

    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Stop a job and free what it holds. Unknown jobs are ignored."""

    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePrefix:
    """Lease the longest held prefix of `block_keys` past the first `skip_blocks`, at once or not at all."""

    call_id: CallId
    block_keys: bytes
    skip_blocks: int
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendLeases:
    """Move the deadlines of leases."""

    call_id: CallId
    lease_ids: tuple[str, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmLease:
    """Ask whether `pages` still have the generations they were granted with, and end the lease."""

    call_id: CallId
    lease_id: str
    pages: tuple[LeasedPage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLeases:
    """End leases that will not be pulled. Unknown ones are ignored."""

    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearCache:
    """Drop every cached block that nothing uses (answers with BlocksChanged)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the engine once what it does now is done; running jobs fail as Unavailable."""


Command: TypeAlias = (
    Generate
    | Prefill
    | AttachLease
    | PiecesReady
    | FirstTokenKnown
    | Verdict
    | ReadLocally
    | Cancel
    | LeasePrefix
    | ExtendLeases
    | ConfirmLease
    | ReleaseLeases
    | ClearCache
    | Stop
)

# ---------------------------------------------------------------- events: engine -> front


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The engine is up. First event of all.

    Attributes:
        agent: this replica's memory, for those that pull from it.
        model_fingerprint: hex digest; see ModelIdentity.
        tokenizer_fingerprint: hex digest.
        context_tokens: longest sequence.
        vocab_size: token ids are below it.
        eos_ids: the model's own end-of-sequence ids.
    """

    agent: AgentInfo
    model_fingerprint: str
    tokenizer_fingerprint: str
    context_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A job was taken in; `tokens` of its prefix are held here, and pinned if the prompt comes from elsewhere.

    `prefix_s` is set when the job waits for a prefix: computing here what the other replica holds beyond `tokens` would
    take about this long, s.
    """

    job_id: JobId
    tokens: int
    prefix_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """A Prefill has its pages; `cached_tokens` of the prompt were cached here, `pulled_tokens` after them pulled."""

    job_id: JobId
    lease: LeaseGrant
    cached_tokens: int
    queue_s: float
    pulled_tokens: int = 0
    pulled_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecesFinal:
    """The first `pages` pages of the job's lease are final; `all` when the whole lease is."""

    job_id: JobId
    lease_id: str
    pages: int
    all: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """A Prefill is done. Its lease lives on until confirmed, released or expired, unless `finish_reason` freed it.

    `predicted_s` is what `compute_s` was predicted to be at `Granted`.
    """

    job_id: JobId
    position: int
    token: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    computed_tokens: int
    compute_s: float
    predicted_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New output tokens; `position` is the absolute position of the first. A forced token is not told again."""

    job_id: JobId
    position: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Every READ of the job's lease is done; the front asks the owner to confirm `pages`."""

    job_id: JobId
    lease_id: str
    pages: tuple[LeasedPage, ...]
    stats: PullStats


@dataclass(frozen=True, slots=True, kw_only=True)
class PullFailed:
    """The pull failed; the job waits for AttachLease or ReadLocally, or reads its prompt when it waited for a prefix.

    `reason` is one word: "timeout" (no progress), "refused", "layout" or "short" (the lease does not fit), "gap" or
    "evicted" (the prefix held here had to give way: lease from token 0), "room" (none for a prefix now), or what the
    transport says.
    """

    job_id: JobId
    lease_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The answer is complete; every token was told before."""

    job_id: JobId
    reason: FinishReason
    usage: Usage
    stop_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The job ended with an error; nothing of it is left."""

    job_id: JobId
    error: KvrelayError


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReply:
    """Answer to LeasePrefix, ExtendLeases or ConfirmLease.

    Attributes:
        lease: what was granted (LeasePrefix); None: refused, with `reason` "not_held" or "stock_bound".
        ended: leases that were not extended (ExtendLeases).
        valid: the verdict (ConfirmLease), with `reason` "generation" or "unknown_lease" when False.
    """

    call_id: CallId
    lease: LeaseGrant | None = None
    ended: tuple[str, ...] = ()
    valid: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksChanged:
    """The set of blocks held in any tier changed: keys of 16 bytes that came and went."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLoad:
    """A prefix that a lower tier held was loaded, or not.

    Attributes:
        tier: "disk".
        choice: "loaded"; "computed" (predicted to be faster); "failed" (it was not there, whole and right: computed).
        tokens: tokens that are in the cache by it; of "computed", those that could have been.
        bytes: their KV.
        expected_s: predicted time of the load.
        elapsed_s: what it took, the wait for the tier's thread included.
    """

    tier: str
    choice: str
    tokens: int
    bytes: int
    expected_s: float
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierWrote:
    """Pages were written to a lower tier; `unwritten_pages` were worth it but found too many on their way."""

    tier: str
    bytes: int
    unwritten_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged:
    """The engine's state, at most every `state_interval_s` and whenever it goes idle."""

    state: ReplicaState


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDied:
    """The engine cannot go on: the replica must turn unhealthy and exit."""

    error: KvrelayError
    detail: str = field(default="", repr=False)


Event: TypeAlias = (
    Started
    | Held
    | Granted
    | PiecesFinal
    | FirstToken
    | Tokens
    | Pulled
    | PullFailed
    | Ended
    | Failed
    | LeaseReply
    | BlocksChanged
    | TierLoad
    | TierWrote
    | StateChanged
    | EngineDied
)
