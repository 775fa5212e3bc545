"""Decides what is worth writing to a tier. Pure."""


def worth_writing(*, hits: int, bytes_free: int, file_bytes: int) -> bool:
    """Tell whether a final page should be written through.

    While the tier has room, every page is: it displaces nothing, and after a restart a prompt that was seen once is
    there. Once writing means dropping another page, only pages that have been hit since they were cached are: a stream
    of prompts that never come back must not drive out those that do.
    """
    return hits > 0 or bytes_free >= file_bytes
