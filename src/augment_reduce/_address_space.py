"""A limit of the address space (`ulimit -v`) that torch and its libraries do not fit into, told before they are loaded.

OpenBLAS tries again for ever where it gets no memory as it is loaded, and others end in messages about their own files.
"""

SMALLEST = 1_150_000_000  # bytes that importing numpy, torch and numba takes, about


def check() -> None:
    try:
        import resource
    except ImportError:  # not a Unix
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < SMALLEST:
        raise MemoryError(
            f"augment-reduce needs an address space of about {SMALLEST / 1e9:.2f} GB to load torch and numba, but the "
            f"limit of this process is {limit / 1e9:.2f} GB. Raise it (ulimit -v, RLIMIT_AS)."
        )
