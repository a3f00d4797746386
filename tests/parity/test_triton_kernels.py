"""The Triton kernels against plain torch. On a GPU they run there; elsewhere in Triton's interpreter.

The interpreter must be chosen before Triton is imported, which another test of the same process may have done:
without a GPU this file runs itself, and tests/parity/test_triton_safety.py, in processes of their own.
"""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED and not torch.cuda.is_available():

    @pytest.mark.parametrize("name", ["test_triton_kernels.py", "test_triton_safety.py"])
    def test_kernels_in_the_interpreter(name):
        file = os.path.join(os.path.dirname(__file__), name)
        command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", file]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=3600)
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
        assert " passed" in run.stdout

else:
    import triton
    import triton.language as tl

    import augment_reduce.nn.head as head_module
    from augment_reduce.model.noise import Gumbel, Logistic, Normal
    from augment_reduce.nn import AugmentReduceHead, _hash, _step
    from augment_reduce.nn._rows import rounded
    from augment_reduce.nn.triton import draw as draw_kernels
    from augment_reduce.nn.triton import noise as noise_kernels
    from augment_reduce.nn.triton import step as triton_step
    from augment_reduce.nn.triton import update as update_kernels
    from tests.helpers import rng

    DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
    # The interpreter computes in numpy, which warns of a division by zero in lanes that a mask throws away.
    pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

    def steps(
        monkeypatch, backend, shape, n_steps=2, *, model="softmax", dtype=torch.float32, weight_dtype=torch.float32,
        reduction="mean", **options,
    ):  # fmt: skip
        """Losses, gradients by hidden and the whole state after a few steps with one of the two backends."""
        B, S, K, D = shape
        g = rng(B + S)
        hidden, target = torch.randn(B, D, generator=g), torch.randint(K, (B,), generator=g)
        target[: 2 * B // 3] = target[0]  # repeated, often enough for whole chunks of places
        if B > 2:
            target[-2] = -100
        sample_weight, index = torch.rand(B, generator=g), torch.randperm(2 * B, generator=g)[:B]
        head = AugmentReduceHead(
            D, K, model, n_sampled_classes=S, class_counts=1.0 / torch.arange(1, K + 1), n_rows=2 * B, generator=g,
            reduction=reduction, device=DEVICE, dtype=weight_dtype, **{"optimizer": "adagrad", **options},
        )  # fmt: skip
        monkeypatch.setattr(head_module, "backend_for", lambda *_: backend)
        found = {}
        for t in range(n_steps):
            h = (hidden + 0.1 * t).to(DEVICE, dtype).requires_grad_()
            loss = head(h, target.to(DEVICE), index=index.to(DEVICE), sample_weight=sample_weight.to(DEVICE))
            loss.backward(torch.linspace(0.5, 1.5, B, device=DEVICE) if loss.ndim else None)
            found[f"loss {t}"], found[f"hidden {t}"] = loss.detach().cpu().double(), h.grad.cpu().double()
        state = {name: x.cpu().double() for name, x in head.state_dict().items()}
        sparse = [p.grad.cpu().to_dense().double() for p in head.parameters() if p.grad is not None]
        return {**found, **state, **{f"gradient {i}": x for i, x in enumerate(sparse)}}

    def assert_same(ours, theirs, tolerance, skip=()):
        assert ours.keys() == theirs.keys()
        for name in ours:
            if any(part in name for part in skip):
                continue
            # A mean of scores of both signs is small by chance; its error is one of the scores, which are of size 1.
            least = 1.0 if name == "local.label_mean" else 1e-6
            error = (ours[name] - theirs[name]).norm() / theirs[name].norm().clamp_min(least)
            assert error < tolerance, f"{name}: relative error {float(error):.1e}"

    EVEN, ODD = (32, 32, 64, 32), (21, 19, 83, 21)

    @pytest.mark.parametrize(
        ("shape", "options"),
        [
            (EVEN, {"local": "amortised", "class_sampling": "uniform-shared"}),
            (ODD, {"local": "fresh", "class_sampling": "stratified-shared", "optimizer": "rowwise-adagrad"}),
            (ODD, {"local": "persistent", "class_sampling": "frequency-shared", "optimizer": "adam"}),
            (EVEN, {"model": "probit", "local": "amortised", "class_sampling": "frequency-shared"}),
            (ODD, {"model": "logistic", "local": "fresh", "class_sampling": "stratified-shared", "optimizer": "adam"}),
            (ODD, {"model": "probit", "local": "persistent", "class_sampling": "uniform-shared"}),
            (ODD, {"model": "logistic", "local": "amortised", "n_nodes": 3, "reduction": "sum"}),
            (ODD, {"local": "fresh", "reduction": "none", "bias": False}),
            (ODD, {"local": "fresh", "optimizer": None}),  # row-sparse gradients
            (EVEN, {"local": "fresh", "reduction": "none", "optimizer": None}),
            ((9, 1, 50, 7), {"local": "amortised", "class_sampling": "uniform-shared"}),  # one class sampled
            ((9, 1, 50, 7), {"local": "fresh", "class_sampling": "stratified-shared"}),
            ((1, 1, 2, 1), {"local": "fresh", "class_sampling": "uniform-shared"}),
            ((8, 20, 20, 16), {"local": "fresh", "class_sampling": "all"}),
            ((100, 13, 83, 21), {"local": "amortised", "optimizer": "adam"}),  # a class with more than 60 places
            ((130, 19, 83, 21), {"local": "fresh", "optimizer": "rowwise-adagrad", "bias": False}),
            (ODD, {"local": "amortised", "floor": None}),
            (ODD, {"local": "amortised", "in_batch": True, "class_sampling": "uniform-shared"}),
            (ODD, {"model": "logistic", "local": "log-sum-exp", "in_batch": True}),
            (ODD, {"local": "log-sum-exp", "z_loss": 0.1, "in_batch": False}),
            (ODD, {"local": "amortised", "max_norm": 0.01, "weight_decay": 0.1, "optimizer": "adagrad"}),
            (ODD, {"local": "amortised", "max_norm": 0.01, "weight_decay": 0.1, "optimizer": "rowwise-adagrad"}),
            ((9, 8, 50, 7), {"local": "fresh", "max_norm": 0.01, "weight_decay": 0.1, "optimizer": "adam"}),
            (ODD, {"local": "amortised", "floor": 0.1}),  # acts on many rows
        ],
        ids=lambda x: "-".join(map(str, x.values() if isinstance(x, dict) else x)),
    )
    def test_step_parity(shape, options, monkeypatch):
        """Loss, gradients, weights, optimiser state, local state, counters: everything that a step leaves behind."""
        ours, theirs = (steps(monkeypatch, backend, shape, **options) for backend in (triton_step, _step))
        assert_same(ours, theirs, 2e-5)

    @pytest.mark.parametrize("model", ["softmax", "logistic"])
    def test_bfloat16_products(model, monkeypatch):
        """The plain twin computes in float32 from the same bfloat16 rows; pulls and products here round to 8 bits."""
        options = {"n_steps": 1, "model": model, "dtype": torch.bfloat16, "local": "amortised"}
        ours, theirs = (steps(monkeypatch, backend, ODD, **options) for backend in (triton_step, _step))
        assert_same(ours, theirs, 1e-2, skip=("weight",))  # Adagrad's first step looks at signs alone
        assert abs(float(ours["loss 0"] - theirs["loss 0"])) < 1e-3 * float(theirs["loss 0"])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_bfloat16_weights(dtype, monkeypatch):
        """The same random bits round them: no entry is further off than a spacing, and nearly all are equal."""
        half = {"dtype": dtype, "weight_dtype": torch.bfloat16}
        options = {
            "n_steps": 1,
            "local": "amortised",
            "optimizer": "rowwise-adagrad",
            "learning_rate": 0.01,
            "in_batch": False,
            **half,
        }
        ours, theirs = (steps(monkeypatch, backend, EVEN, **options) for backend in (triton_step, _step))
        off = (ours["weight"] - theirs["weight"]).abs()
        # The gradients differ too, by 1 % of a step of 0.01.
        assert (off <= 2.0**-7 * theirs["weight"].abs() + 2e-4).all()
        assert float((off > 0).double().mean()) < 0.05
        assert_same(ours, theirs, 1e-2, skip=("weight",))

    def test_stochastic_rounding_is_the_same():
        x = torch.randn(8, 16, generator=rng(0)) * 3
        key = _hash.step_key(5, torch.tensor(3), _hash.ROUNDING)
        expected = rounded(x, torch.bfloat16, key, torch.arange(8))
        out = torch.empty(8 * 16, dtype=torch.bfloat16, device=DEVICE)
        counter = torch.tensor([3], device=DEVICE)
        _round[(1,)](x.reshape(-1).to(DEVICE), out, counter, 5, N=128)
        assert torch.equal(out.cpu().reshape(8, 16), expected)

    @pytest.mark.parametrize("name", ["uniform-shared", "frequency-shared", "stratified-shared"])
    def test_the_same_classes_are_drawn(name, monkeypatch):
        K, S = 1_003, 64
        head = AugmentReduceHead(
            4, K, n_sampled_classes=S, class_sampling=name, class_counts=1.0 / torch.arange(1, K + 1), generator=rng(0),
            device=DEVICE,
        )  # fmt: skip
        seen = []

        class Spy:
            @staticmethod
            def forward(*arguments):
                loss, saved = triton_step.forward(*arguments)
                seen.append(saved.classes)
                return loss, saved

        monkeypatch.setattr(head_module, "backend_for", lambda *_: Spy)
        for t in range(3):
            head(torch.randn(2, 4, generator=rng(t)).to(DEVICE), torch.tensor([1, 2], device=DEVICE))
            expected = head.sampler.draw(head.key, torch.tensor(t, device=DEVICE), _hash.MAIN)
            assert torch.equal(seen[t][:S], expected.classes)  # then come the labels of the rows

    @triton.jit(do_not_specialize=["key", "n_classes", "grid_a", "grid_b"])
    def _draw_uniform(Out, Sizes, Counter, key, n_classes, grid_a, grid_b):
        lane = tl.arange(0, 512)
        slot = lane % 128
        inside = slot < tl.load(Sizes + lane // 128)
        classes, _ = draw_kernels.draw(
            slot, inside, Counter, Counter, Counter, Counter, Counter, key, n_classes, 0, 1, 1, grid_a, grid_b,
            draw_kernels.UNIFORM, draw_kernels.MAIN,
        )  # fmt: skip
        tl.store(Out + lane, classes, mask=inside)

    @pytest.mark.parametrize("n_classes", range(2, 81))
    def test_lanes_beyond_the_sample_are_not_walked(n_classes):
        """Four samples, each in a block with more lanes than |S| and than K: the walk of a masked lane had no end."""
        sizes = [max(0, size) for size in (n_classes, n_classes - 1, n_classes - 15, 1)]
        for t in range(1 if INTERPRETED else 200):
            counter, out = torch.tensor([n_classes + t], device=DEVICE), torch.full((4, 128), -1, device=DEVICE)
            grid = _hash.grid_of(n_classes)
            _draw_uniform[(1,)](out, torch.tensor(sizes, device=DEVICE), counter, 7, n_classes, *grid)
            random = _hash.step_key(7, counter.cpu()[0], _hash.MAIN)
            expected = _hash.permuted(random, torch.arange(n_classes), n_classes)
            for size, drawn in zip(sizes, out.cpu(), strict=True):
                assert torch.equal(drawn[:size], expected[:size])
                assert (drawn[size:] == -1).all()

    def test_targets_out_of_range_are_left_out_and_reported(monkeypatch):
        monkeypatch.setattr(head_module, "backend_for", lambda *_: triton_step)
        head = AugmentReduceHead(4, 30, n_sampled_classes=8, generator=rng(0), device=DEVICE, reduction="none")
        target = torch.tensor([3, 30, -100, -7, 2], device=DEVICE)
        loss = head(torch.randn(5, 4, generator=rng(1)).to(DEVICE), target)
        assert (loss == 0).tolist() == [False, True, True, True, False]
        with pytest.raises(ValueError, match="but 2 are outside: target=30"):
            head.check_targets()
        head.debug = True
        with pytest.raises(ValueError, match="but 2 are outside"):
            head(torch.randn(5, 4, generator=rng(1)).to(DEVICE), target)

    @pytest.mark.skipif(INTERPRETED, reason="a CUDA graph needs a GPU")
    @pytest.mark.parametrize("options", [{}, {"local": "fresh", "optimizer": "adam"}, {"model": "logistic"}], ids=str)
    def test_a_captured_step_is_the_eager_one(options):
        """Bit by bit, from the same state: gradient by hidden, weights, optimiser, local state, counters."""
        head = AugmentReduceHead(
            64, 5_000, n_sampled_classes=256, generator=rng(0), device=DEVICE, **{"optimizer": "adagrad", **options}
        )
        hidden = torch.randn(256, 64, generator=rng(1)).to(DEVICE, torch.bfloat16).requires_grad_()
        target = torch.randint(50, (256,), generator=rng(2)).to(DEVICE)

        def step():
            hidden.grad = None
            head(hidden, target).backward()
            return hidden.grad

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step(), step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        start = {name: x.clone() for name, x in head.state_dict().items()}
        graph.replay(), graph.replay()
        by_graph = {name: x.clone() for name, x in head.state_dict().items()}
        head.load_state_dict(start)
        step()
        assert torch.equal(step(), captured)
        for name, x in head.state_dict().items():
            assert torch.equal(x, by_graph[name]), name

    @pytest.mark.parametrize(("most", "stretch"), [(1 << 14, 64), (1 << 14, 256), (10, 64)])
    def test_touched_classes_are_sorted(most, stretch, monkeypatch):
        """In stretches, or beyond a size by torch.sort: the same, repeats in the order of their places."""
        monkeypatch.setattr(triton_step, "MOST_MERGED", most)
        monkeypatch.setattr(triton_step, "SORTED", stretch)
        classes = torch.randint(20, (75,), generator=rng(0))
        label = torch.randint(-1, 20, (130,), generator=rng(1)).to(torch.int32)
        ordered, order = triton_step.sort_touched(classes.to(DEVICE), label.to(DEVICE), 20)
        every = torch.cat([classes.to(torch.int32), torch.where(label < 0, 20, label)])
        expected = torch.sort(every, stable=True)
        assert torch.equal(ordered.cpu(), expected.values)
        assert torch.equal(order.cpu().long(), expected.indices)

    @triton.jit
    def _noise(T, Tail, Out, NOISE: tl.constexpr, N: tl.constexpr):
        i = tl.arange(0, N)
        value, first, second = noise_kernels.about_cdf(tl.load(T + i), Tail, NOISE)
        tl.store(Out + i, value)
        tl.store(Out + N + i, first)
        tl.store(Out + 2 * N + i, second)
        value, first, second = noise_kernels.about_density(tl.load(T + i), NOISE)
        tl.store(Out + 3 * N + i, value)
        tl.store(Out + 4 * N + i, first)
        tl.store(Out + 5 * N + i, second)

    @triton.jit(do_not_specialize=["key"])
    def _round(X, Out, Counter, key, N: tl.constexpr):
        i = tl.arange(0, N)
        random = update_kernels.step_key(key, Counter, update_kernels.ROUNDING)
        tl.store(Out + i, update_kernels.at_random(tl.load(X + i), random, i.to(tl.uint32)))

    @pytest.mark.parametrize("noise", [Gumbel(), Normal(), Logistic()], ids=lambda n: n.name)
    def test_noises(noise):
        """Both tails included, against float64. The probit's bend is -r (t + r), which cancels far below 0."""
        t = torch.linspace(-30.0, 9.0, 512)
        tail = triton_step._tables(1, DEVICE)[2]
        out = torch.empty(6, 512, device=DEVICE)
        _noise[(1,)](t.to(DEVICE), tail, out, NOISE=triton_step.NOISES[type(noise)], N=512)
        x = t.double()
        expected = [noise.log_cdf(x), *noise.dlog_cdf_and_derivative(x)]
        expected += [noise.log_prob(x), noise.dlog_prob(x), noise.d2log_prob(x)]
        for found, truth in zip(out.cpu().double(), expected, strict=True):
            assert float(((found - truth).abs() / truth.abs().clamp_min(1e-3)).max()) < 2e-5 + (t.min() ** 2 * 1e-7)
