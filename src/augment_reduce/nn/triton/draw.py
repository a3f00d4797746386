# mypy: disallow-untyped-defs=False
"""Triton: random numbers from (seed, step, place), and classes drawn with them. See nn/_hash.py and nn/_draw.py."""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B9)
ROUNDS = tl.constexpr(12)
UNIFORM, INDEPENDENT, STRATA, EVERY, GIVEN = (tl.constexpr(i) for i in range(5))
MAIN, SECOND, NODE, ROUNDING = (tl.constexpr(i) for i in range(4))


@triton.jit
def mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def step_key(key, Counter, stream: tl.constexpr):
    counter = tl.load(Counter)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    step = mix(mix(key.to(tl.uint32) ^ low) ^ high)
    return mix(step + (stream * GOLDEN) % 4294967296)


@triton.jit
def bits(key, place, lane: tl.constexpr):
    return mix(mix(place ^ key) + ((lane + 1) * GOLDEN) % 4294967296)


@triton.jit
def normal(key, place):
    # Box and Muller; the two scales are 2^-32 and 2 pi 2^-32.
    u = (bits(key, place, 0).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    angle = bits(key, place, 1).to(tl.float64).to(tl.float32) * 1.4629180792671596e-09
    return tl.sqrt(-2.0 * tl.log(u.to(tl.float32))) * tl.cos(angle)


@triton.jit
def permuted(key, place, inside, n, a, b):
    """Feistel network on an a x b grid with cycle walking: points outside 0..n-1 are permuted until they are inside.

    Only lanes that are `inside`, whose place must be below n, are walked: a place beyond n may be on a cycle without a
    point below n. `longest_walk` in nn/_hash.py bounds the rounds by a b - n + 1, and so does the loop.
    """
    x = place
    outside = inside
    rounds_left = (a * b - n + 1).to(tl.int32)
    while (tl.max(outside.to(tl.int32), axis=0) > 0) & (rounds_left > 0):
        left, right = x // b, x % b
        for r in tl.static_range(0, ROUNDS, 2):
            left = (left + bits(key, right, r) % a) % a
            right = (right + bits(key, left, r + 1) % b) % b
        x = tl.where(outside, left * b + right, x)
        outside = inside & (x >= n)
        rounds_left -= 1
    return x


@triton.jit
def from_table(key, place, Cumulative, n_classes, n_random, n_halvings, KIND: tl.constexpr):
    """(class, log weight): the interval of the cumulative sums that contains a random number, by bisection."""
    total = tl.load(Cumulative + (n_classes - 1))
    if KIND == INDEPENDENT:
        high = (bits(key, place, 0) >> 6).to(tl.float64)
        low = (bits(key, place, 1) >> 6).to(tl.float64)
        share = (high * 67108864.0 + low) * 2.220446049250313e-16
    else:
        share = (place.to(tl.float64) + bits(key, place, 0).to(tl.float64) * 2.3283064365386963e-10) / n_random
    at = share * total
    lower = tl.zeros_like(place).to(tl.int64)
    upper = lower + (n_classes - 1)
    for _ in range(n_halvings):
        middle = (lower + upper) // 2
        beyond = tl.load(Cumulative + middle) <= at
        lower = tl.where(beyond, tl.minimum(middle + 1, upper), lower)
        upper = tl.where(beyond, upper, middle)
    below = tl.load(Cumulative + lower - 1, mask=lower > 0, other=0.0)
    mass = tl.load(Cumulative + lower) - below
    return lower, tl.log((total / (mass * n_random)).to(tl.float32))


@triton.jit
def draw(
    slot, inside, Certain, Cumulative, Given, GivenLog, Counter, key, n_classes, n_certain, n_random, n_halvings,
    grid_a, grid_b, KIND: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """(class int64, log weight float32) of each slot."""
    if KIND == GIVEN:
        classes = tl.load(Given + slot, mask=inside, other=0)
        log_weight = tl.load(GivenLog + slot, mask=inside, other=0.0)
    elif KIND == EVERY:
        classes = slot.to(tl.int64)
        log_weight = tl.zeros_like(slot).to(tl.float32)
    else:
        random = step_key(key, Counter, STREAM)
        sure = slot < n_certain
        random_slot = inside & (slot >= n_certain)
        place = tl.where(random_slot, slot - n_certain, 0).to(tl.uint32)
        if KIND == UNIFORM:
            picked = permuted(
                random, place, random_slot, n_classes.to(tl.uint32), grid_a.to(tl.uint32), grid_b.to(tl.uint32)
            )
            drawn = picked.to(tl.int64)
            weight = n_classes.to(tl.float32) / n_random
            drawn_log = tl.zeros_like(slot).to(tl.float32) + tl.log(weight)
        else:
            drawn, drawn_log = from_table(random, place, Cumulative, n_classes, n_random, n_halvings, KIND)
        always = tl.load(Certain + slot, mask=sure & inside, other=0)
        classes = tl.where(sure, always, drawn)
        log_weight = tl.where(sure, 0.0, drawn_log)
    return classes, log_weight
