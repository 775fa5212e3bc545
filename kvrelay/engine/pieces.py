"""When KV that is final is announced to the one that pulls it. Pure.

Announcing early hides the transfer behind the computing of the rest of the prompt, and each announcement costs
something; `kvrelay.config.PIECE_KIB` weighs one against the other. What no piece can hide is the last of them: the
pages of the last step, and those that were too few before it.
"""


def smallest_piece(piece_kib: int, page_bytes: int) -> int:
    """Return the pages of the smallest piece worth announcing early, at least one."""
    return max(-(-piece_kib * 1024 // page_bytes), 1)


def pages_to_tell(*, final: int, told: int, total: int, smallest: int) -> int:
    """Return how many of a lease's pages are to be known as final now, counted from its front.

    A short prompt is told in one piece, when it is complete; a long one whenever enough of it is.

    Args:
        final: pages that are final.
        told: pages that were announced already; returned when a new message would not pay.
        total: pages of the lease.
        smallest: pages of the smallest early piece.
    """
    return final if final == total or final - told >= smallest else told
