"""Both backends do the same with what could lose training or poison a head: every scenario of head_faults.py.

Run by tests/parity/test_triton_kernels.py in Triton's interpreter, or directly where there is a GPU.
"""

import math
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED or torch.cuda.is_available():
    import augment_reduce.nn._input as input_module
    import augment_reduce.nn.head as head_module
    from augment_reduce.nn import AugmentReduceHead, _step
    from augment_reduce.nn._targets import BAD_WEIGHTS, SKIPPED
    from augment_reduce.nn.triton import step as triton_step
    from tests.helpers import head_faults as faults
    from tests.helpers import rng
    from tests.helpers.head_faults import B, D, K, S

    DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
    pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy in masked lanes, and of skipped rows

    def assert_same(ours, theirs, at="", rtol=2e-5):
        """Nested results: equal where they are whole numbers, NaN where NaN, else to rounding."""
        if isinstance(ours, dict):
            assert ours.keys() == theirs.keys()
            for name in ours:
                assert_same(ours[name], theirs[name], f"{at} {name}", rtol)
        elif isinstance(ours, torch.Tensor) and ours.is_floating_point():
            # A mean of scores of both signs is small by chance; its error is one of the scores, which are of size 1.
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=2e-6, equal_nan=True, msg=lambda m: f"{at}: {m}")
        else:
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)), at

    def on_both(scenario, monkeypatch, options, **arguments):
        def make():
            given = {"optimizer": "adagrad", "n_sampled_classes": S, "n_rows": B, **options}
            return AugmentReduceHead(D, K, generator=rng(1), device=DEVICE, **given)

        found = []
        for backend in (triton_step, _step):
            monkeypatch.setattr(head_module, "backend_for", lambda *_, b=backend: b)
            found.append(scenario(make, **arguments))
        return found

    OPTIONS = [
        {},
        {"reduction": "none", "optimizer": "adam"},
        {"model": "probit", "local": "persistent"},
        {"model": "logistic", "local": "fresh", "optimizer": "rowwise-adagrad"},
    ]

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
    def test_a_bad_hidden_row(options, value, monkeypatch):
        ours, theirs = on_both(faults.a_bad_hidden_row, monkeypatch, options, value=value)
        assert_same(ours, theirs)
        assert ours["skipped"] == 1
        assert all(x.isfinite().all() for x in ours["later"].values())

    @pytest.mark.parametrize("options", [{}, {"optimizer": "adam", "model": "probit"}, {"reduction": "none"}], ids=str)
    @pytest.mark.parametrize("value", [math.inf, math.nan])
    def test_a_bad_upstream_gradient(options, value, monkeypatch):
        ours, theirs = on_both(faults.a_bad_upstream_gradient, monkeypatch, options, value=value)
        assert_same(ours, theirs)
        assert ours["skipped"] == (1 if "reduction" in options else B)
        assert all(x.isfinite().all() for x in ours["later"].values())

    @pytest.mark.parametrize("options", [*OPTIONS, {"local": "fresh"}, {"floor": None}], ids=str)
    @pytest.mark.parametrize(("value", "which"), [(math.nan, 4), (math.nan, 18), (math.inf, 24)])
    def test_a_bad_weight_row(options, value, which, monkeypatch):
        """A minimum with a bound made a score of it that is finite: the loss was 1e30, the gradient by hidden NaN."""
        ours, theirs = on_both(faults.a_bad_weight_row, monkeypatch, options, value=value, which=which)
        assert_same(ours, theirs)
        assert ours["skipped"] > 0
        assert all(ours[f"gradient {t}"].isfinite().all() for t in range(4))

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("how", ["empty", "ignored"])
    def test_nothing_to_learn_at_first(options, how, monkeypatch):
        ours, theirs = on_both(faults.nothing_to_learn_at_first, monkeypatch, options, how=how)
        assert_same(ours, theirs)
        for name, x in ours["after"].items():
            assert "counter" in name or torch.equal(x, ours["before"][name]), name

    @pytest.mark.parametrize("which", ["both", "weight", "bias"])
    def test_frozen(which, monkeypatch):
        ours, theirs = on_both(faults.frozen, monkeypatch, {}, which=which)
        assert_same(ours, theirs)
        assert torch.equal(ours["after"]["weight"], ours["before"]["weight"]) == (which != "bias")

    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("options", [{}, {"model": "probit", "local": "persistent"}, {"local": "fresh"}], ids=str)
    def test_recomputed(options, use_reentrant, monkeypatch):
        ours, theirs = on_both(faults.recomputed, monkeypatch, options, use_reentrant=use_reentrant, chunks=1)
        assert_same(ours, theirs)
        plain, _ = on_both(faults.not_recomputed, monkeypatch, options, chunks=1)
        assert_same(ours, plain, rtol=1e-6)

    def test_gradient_asked_for_alone(monkeypatch):
        ours, theirs = on_both(faults.gradient_asked_for_alone, monkeypatch, {})
        assert_same(ours, theirs)
        assert_same(ours["between"], ours["before"])

    def test_a_second_backward_pass_is_refused(monkeypatch):
        def twice(make):
            head = make()
            hidden, target = (x.to(DEVICE) for x in faults.batch())
            loss = head(hidden, target)
            loss.backward(retain_graph=True)
            with pytest.raises(RuntimeError, match="a second time"):
                loss.backward()
            return faults.state(head)

        assert_same(*on_both(twice, monkeypatch, {}))

    @pytest.mark.parametrize("options", [{}, {"local": "fresh"}, {"floor": None, "local": "fresh"}], ids=str)
    @pytest.mark.parametrize("scale", [1.0, 70.0, 1_000.0])
    def test_far_logits(options, scale, monkeypatch):
        """Sums of exponentials that float32 cannot hold, in several blocks of classes."""
        every = {"class_sampling": "all", "n_sampled_classes": K, "optimizer": None, "sparse_grad": False}
        ours, theirs = on_both(faults.far_logits, monkeypatch, {**every, **options}, scale=scale)
        assert_same(ours, theirs, rtol=4e-6 * max(5.0, scale))  # e^(psi - c), both a few times scale
        if options:  # c is exact then
            torch.testing.assert_close(ours["loss"], ours["exact"], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours["gradient"], ours["exact gradient"], rtol=1e-4, atol=1e-5 * scale)
            torch.testing.assert_close(ours["of weights"], ours["exactly"], rtol=1e-4, atol=1e-6 * scale)

    def test_far_logits_of_the_logistic(monkeypatch):
        """log Phi = t, not -80, far below 0: clamped, the bound was above log p."""
        options = {
            "model": "logistic",
            "class_sampling": "all",
            "n_sampled_classes": K,
            "floor": None,
            "optimizer": None,
        }
        assert_same(*on_both(faults.far_logits, monkeypatch, options, scale=300.0))

    def test_sample_weights_below_0_are_left_out_and_counted(monkeypatch):
        """On a GPU; on the CPU the edge refuses them at once."""

        def run(make):
            head = make()
            hidden, target = (x.to(DEVICE) for x in faults.batch())
            weight = torch.linspace(-0.5, 1.0, B, device=DEVICE)
            weight[-1] = 3e38  # the sum of a few of these is beyond float32
            monkeypatch.setattr(input_module, "check_sample_weight", lambda _: None)
            head(hidden, target, sample_weight=weight).backward()
            assert int(head.clock.tally[BAD_WEIGHTS]) == int((weight < 0).sum()) + 1
            assert int(head.clock.tally[SKIPPED]) == 0
            with pytest.raises(ValueError, match="below 1e15 and not negative, but 9 were not"):
                head.check_targets()
            return faults.state(head)

        assert_same(*on_both(run, monkeypatch, {}))

    def test_a_parametrized_weight_is_refused(monkeypatch):
        def run(make):
            head = make()
            torch.nn.utils.parametrize.register_parametrization(head, "weight", torch.nn.Tanh())
            with pytest.raises(RuntimeError, match="optimizer=None with sparse_grad=False"):
                head(*(x.to(DEVICE) for x in faults.batch()))
            return {}

        on_both(run, monkeypatch, {})
