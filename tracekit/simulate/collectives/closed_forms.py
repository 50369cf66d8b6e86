"""What each rank of a collective has to send, worked out from sizes alone: what the counts of ``virtual`` are held against.

Exact for chunks of any sizes, c[i] the chunk of position i and S their sum:

    ring all_gather       S - c[i+1]: every chunk but the one that its next position owns
    naive all_gather      (x-1) c[i]
    ring reduce_scatter   S - c[i]: every chunk but its own
    ring all_reduce       2 S - c[i] - c[i+1]
    star broadcast        the root (x-1) S
    tree broadcast        S for each child in the binomial tree
    reduce                S, but the root nothing
    star, tree all_reduce what reduce and broadcast from position 0 send
    star scatter          the root S - c[root]
    tree scatter          everything below it in the tree
    star gather           c[i], but the root nothing
    tree gather           its own chunk and everything below it, but the root nothing
    pairwise all_to_all   its pieces but the one it keeps

For even chunks these are ``tracekit.collectives.semantics.sent_bytes``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def sent_elements(kind: str, algorithm: str, chunks: Sequence[int], root: int = 0) -> list[int]:
    """Elements that each position sends. ``chunks``: elements of each position's chunk; only their sum counts where nothing is cut."""
    size, whole = len(chunks), sum(chunks)

    def after(i: int) -> int:
        return chunks[(i + 1) % size] if size > 1 else whole

    def own(i: int) -> int:
        return chunks[i] if size > 1 else whole

    def reduced(i: int) -> int:
        return 0 if i == root else whole

    def spread(i: int) -> int:
        if algorithm == "star":
            return (size - 1) * whole if i == root else 0
        return whole * tree_children((i - root) % size, size)

    def below(i: int) -> int:
        place = (i - root) % size
        return sum(chunks[(root + k) % size] for k in range(place + 1, tree_end(place, size)))

    forms: dict[tuple[str, str], Callable[[int], int]] = {
        ("all_gather", "ring"): lambda i: whole - after(i),
        ("all_gather", "naive"): lambda i: (size - 1) * own(i),
        ("reduce_scatter", "ring"): lambda i: whole - own(i),
        ("all_reduce", "ring"): lambda i: 2 * whole - own(i) - after(i),
        ("scatter", "star"): lambda i: whole - own(i) if i == root else 0,
        ("scatter", "tree"): below,
        ("gather", "star"): lambda i: 0 if i == root else own(i),
        ("gather", "tree"): lambda i: 0 if i == root else own(i) + below(i),
    }
    for both in ("star", "tree"):
        forms["broadcast", both] = spread
        forms["reduce", both] = reduced
        forms["all_reduce", both] = lambda i: reduced(i) + spread(i)
    return [forms[kind, algorithm](i) for i in range(size)]


def tree_children(place: int, size: int) -> int:
    """To how many positions ``place`` (counted from the root) hands on in a binomial broadcast tree over ``size`` positions."""
    powers = (2**k for k in range(size.bit_length()))
    return sum(power > place and place + power < size for power in powers)


def tree_end(place: int, size: int) -> int:
    """Behind the last position in the scatter tree's branch that begins at ``place``: its lowest bit says how many there are."""
    return size if place == 0 else min(size, place + (place & -place))
