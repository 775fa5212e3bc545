"""The one tree of errors.

    KvrelayError                      status               a retry helps
    ├── InvalidArgument               INVALID_ARGUMENT     no
    ├── NotFound                      NOT_FOUND            no
    ├── FailedPrecondition            FAILED_PRECONDITION  no (elsewhere, perhaps)
    │   ├── Mismatch
    │   └── StaleIncarnation
    ├── ResourceExhausted             RESOURCE_EXHAUSTED   yes, after `retry_after_s`
    ├── Unavailable                   UNAVAILABLE          yes, elsewhere
    │   ├── PeerLost
    │   └── Draining
    ├── DeadlineExceeded              DEADLINE_EXCEEDED    no
    ├── Cancelled                     CANCELLED            no
    ├── Unauthenticated               UNAUTHENTICATED      no
    └── InternalError                 INTERNAL             no

Messages tell the reader what to do. `kvrelay.rpc` maps this tree to gRPC statuses and back; nothing else does.
"""

from typing import ClassVar


class KvrelayError(Exception):
    """Base of all errors that kvrelay raises on purpose.

    Attributes:
        status: name of the gRPC status code.
        retryable: whether the same request may succeed later or elsewhere.
    """

    status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries; subclasses take other arguments than the message.
        return _restore, (type(self), self.message, self.__dict__)


def _restore(cls: type[KvrelayError], message: str, state: dict[str, object]) -> KvrelayError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class InvalidArgument(KvrelayError):
    """The input is wrong; names the field and the limit."""

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class NotFound(KvrelayError):
    """The thing asked for is not there."""

    status = "NOT_FOUND"


class FailedPrecondition(KvrelayError):
    """The system is not in the state the request needs."""

    status = "FAILED_PRECONDITION"


class Mismatch(FailedPrecondition):
    """Two processes differ where they must agree; names the field and both values."""

    def __init__(self, field: str, expected: object, got: object) -> None:
        super().__init__(f"{field} differs: expected {expected}, got {got}")
        self.field = field
        self.expected = str(expected)
        self.got = str(got)


class StaleIncarnation(FailedPrecondition):
    """The replica has been restarted since the caller learned of it."""


class ResourceExhausted(KvrelayError):
    """Too much load now; try again after `retry_after_s`."""

    status = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(KvrelayError):
    """The service cannot answer now; another replica may."""

    status = "UNAVAILABLE"
    retryable = True


class PeerLost(Unavailable):
    """A peer died, hangs or cannot be reached."""


class Draining(Unavailable):
    """The process is shutting down and takes no new work."""


class DeadlineExceeded(KvrelayError):
    """The caller's deadline passed."""

    status = "DEADLINE_EXCEEDED"


class Cancelled(KvrelayError):
    """The caller went away or cancelled."""

    status = "CANCELLED"


class Unauthenticated(KvrelayError):
    """Credentials are missing or wrong."""

    status = "UNAUTHENTICATED"


class InternalError(KvrelayError):
    """A bug or a broken environment; the log has the cause under the request id."""

    status = "INTERNAL"
