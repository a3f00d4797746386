"""`patch(model)` on small random models of transformers: training without logits, all else as before."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers", reason="an optional extra")
pytestmark = pytest.mark.filterwarnings("ignore")

from augment_reduce.integrations.transformers import patch, unpatch  # noqa: E402
from augment_reduce.nn import AugmentReduceHead  # noqa: E402

V, D = 200, 16


def llama(tied=False, **options):
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_embd=D, n_layer=1, n_head=2, n_positions=64)
    )


def bert(n_labels=V):
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=50,
            hidden_size=D,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            num_labels=n_labels,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def llama_classifier():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=D, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_labels=V, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForSequenceClassification(config)


def tokens(n=6, T=9, high=V):
    return torch.randint(1, high, (n, T), generator=torch.Generator().manual_seed(1))


EXACT = {"class_sampling": "all", "n_sampled_classes": V, "local": "fresh", "floor": None}


@pytest.mark.parametrize("make", [llama, lambda: llama(tied=True)], ids=["llama", "llama-tied"])
def test_training_is_the_exact_loss_where_every_class_is_drawn(make):
    """Loss and every gradient of the network, without logits; ignored labels are left out."""
    x = tokens()
    y = x.clone()
    y[:, :3] = -100
    exact, model = make().train(), patch(make(), **EXACT).train()
    expected, found = exact(input_ids=x, labels=y), model(input_ids=x, labels=y)
    assert found.logits is None
    torch.testing.assert_close(found.loss, expected.loss)
    expected.loss.backward(), found.loss.backward()
    theirs = dict(exact.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, theirs[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [bert, llama_classifier])
def test_sequence_classification(make):
    x, y = tokens(high=50), torch.randint(V, (6,), generator=torch.Generator().manual_seed(2))
    exact, model = make().train(), patch(make(), **EXACT).train()
    mask = torch.ones_like(x)
    expected, found = (m(input_ids=x, attention_mask=mask, labels=y) for m in (exact, model))
    torch.testing.assert_close(found.loss, expected.loss)
    found.loss.backward(), expected.loss.backward()
    theirs = dict(exact.named_parameters())
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, theirs[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [llama, bert])
def test_evaluation_is_as_before(make):
    x = tokens(high=50)
    y = x if make is llama else x[:, 0]
    plain, model = make().eval(), patch(make(), n_sampled_classes=8).eval()
    a, b = plain(input_ids=x, labels=y), model(input_ids=x, labels=y)
    torch.testing.assert_close(a.loss, b.loss)
    torch.testing.assert_close(a.logits, b.logits)
    assert type(model).__name__ == type(plain).__name__
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    if make is llama:
        ours = model.generate(x, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert torch.equal(ours, plain.generate(x, max_new_tokens=3, do_sample=False, pad_token_id=0))


@pytest.mark.parametrize("make", [llama, lambda: llama(tied=True), bert], ids=["llama", "tied", "bert"])
def test_what_is_saved_loads_anywhere(make, tmp_path):
    model = patch(make(), n_sampled_classes=8)
    x = tokens(high=50)
    y = x if hasattr(model, "lm_head") else x[:, 0]
    model.train()(input_ids=x, labels=y).loss.backward()
    model.save_pretrained(tmp_path)
    loaded = type(make()).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.eval()(input_ids=x).logits, model.eval()(input_ids=x).logits)
    again = patch(loaded, n_sampled_classes=8)
    assert again.train()(input_ids=x, labels=y).loss.isfinite()
    tied = getattr(model.config, "tie_word_embeddings", False) and hasattr(model, "lm_head")
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) if tied else True


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_patched_and_their_own(copied):
    model = patch(llama(), n_sampled_classes=8)
    twin = copied(model)
    x = tokens()
    assert model.train()(input_ids=x, labels=x).loss == twin.train()(input_ids=x, labels=x).loss
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert model.lm_head.weight.abs().sum() > 0
    assert twin.eval()(input_ids=x).logits.abs().max() == 0
    layer = unpatch(twin).lm_head
    assert type(layer) is nn.Linear
    assert type(twin) is transformers.LlamaForCausalLM


@pytest.mark.parametrize("optimizer", [None, "adagrad"])
def test_inside_a_trainer(optimizer, tmp_path):
    """Defaults, with accumulation, clipping and a checkpoint; the exact loss falls."""
    pytest.importorskip("accelerate")
    x = tokens(n=32)
    rows = [{"input_ids": a, "labels": a} for a in x]
    counts = torch.bincount(x.reshape(-1), minlength=V)
    model = patch(llama(), n_sampled_classes=32, class_counts=counts, optimizer=optimizer)
    before = float(model.eval()(input_ids=x, labels=x).loss)
    arguments = transformers.TrainingArguments(
        tmp_path, num_train_epochs=8, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=0.01,
        report_to=[], disable_tqdm=True, save_strategy="epoch", logging_strategy="no", use_cpu=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.3
    assert float(model.lm_head.clock.counter) == 8 * 4
    resumed = patch(llama(), n_sampled_classes=32, class_counts=counts, optimizer=optimizer)
    again = transformers.Trainer(resumed, arguments, train_dataset=rows, eval_dataset=rows)
    last = max(tmp_path.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    again.train(resume_from_checkpoint=str(last))
    torch.testing.assert_close(resumed.lm_head.weight, model.lm_head.weight)
    assert int(resumed.lm_head.clock.counter) == 32


def test_a_trainers_sum_over_micro_batches():
    x = tokens()
    model = patch(llama(), **EXACT).train()
    mean = model(input_ids=x, labels=x).loss
    n = x[:, 1:].numel()
    torch.testing.assert_close(model(input_ids=x, labels=x, num_items_in_batch=2 * n).loss, mean / 2)
    loss, *_ = model(input_ids=x, labels=x, return_dict=False)
    torch.testing.assert_close(loss, mean)


def test_models_that_cannot_be_patched():
    with pytest.raises(TypeError, match=r"class ends in ForCausalLM or ForSequenceClassification, found Linear"):
        patch(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"ties lm_head\.weight to its embedding"):
        patch(llama(tied=True), optimizer="adagrad")
    with pytest.raises(ValueError, match="a head already"):
        patch(patch(llama(), n_sampled_classes=8))
    model = llama()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"final_logit_softcapping=30\.0"):
        patch(model)
    strange = bert()
    strange.classifier = nn.Sequential(nn.Linear(D, D), nn.Linear(D, V))
    with pytest.raises(TypeError, match=r"classifier to be an nn\.Linear, found Sequential"):
        patch(strange)
    del strange.classifier
    with pytest.raises(TypeError, match="output layer in classifier or score, found neither among bert"):
        patch(strange)
    several = bert()
    several.config.problem_type = "multi_label_classification"
    with pytest.raises(ValueError, match="found 'multi_label_classification'"):
        patch(several)
    with pytest.raises(ValueError, match="Expected a patched model"):
        unpatch(llama())


def test_logits_that_are_changed_are_found_out():
    """Nothing in the config says so, but the rows are not those that the layer was given."""

    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            found["logits"] = 0.5 * found.logits
            return found

    torch.manual_seed(0)
    scaled = Scaled(llama().config)
    with pytest.raises(ValueError, match="changes the output of lm_head"):
        patch(scaled, n_sampled_classes=8).train()(input_ids=tokens(), labels=tokens())


def test_gpt2_loses_no_weight_tie():
    model = patch(gpt2(), n_sampled_classes=8)
    assert isinstance(model.lm_head, AugmentReduceHead)
    assert model.lm_head.weight is model.transformer.wte.weight
    x = tokens()
    loss = model.train()(input_ids=x, labels=x).loss
    loss.backward()
    assert model.transformer.wte.weight.grad is not None
    exact = F.cross_entropy(model.eval()(input_ids=x).logits[:, :-1].reshape(-1, V), x[:, 1:].reshape(-1))
    torch.testing.assert_close(model(input_ids=x, labels=x).loss, exact)
