# SPDX-License-Identifier: Apache-2.0
"""A workload that is read from a model: layers, parameters and multiplications, and a model left as it was."""

import copy

import pytest
import torch
from cases import for_each
from commands import refused, told
from torch import nn

import commrt
from commrt import UsageError
from commrt.tools import Workload, workload_of
from commrt.tools.measuring.workload_of import UNCOUNTED
from commrt.tools.planning.workload import MODELS, Layer

DEVICES = ("cpu", "meta")


class Transformer(nn.Module):
    def __init__(self, width, depth, tokens, vocabulary, heads=4):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def test_the_models_that_ship_have_the_published_sizes():
    shipped = {name: Workload.named(name) for name in MODELS}
    assert {name: model.name for name, model in shipped.items()} == {name: name for name in MODELS}
    sizes = {name: (round(model.numel / 1e6, 1), round(2 * model.work / 1e9, 1)) for name, model in shipped.items()}
    assert sizes == {
        "resnet50": (25.6, 8.2),
        "vgg_a": (132.9, 15.2),
        "overfeat_fast": (145.9, 5.6),
        "cd_dnn": (45.1, 0.1),
    }


@for_each(("device", "shape"), [("meta", (768, 12, 1024, 50_257)), ("cpu", (64, 3, 32, 100))])
def test_a_transformer_has_the_parameters_and_multiplications_that_the_cost_model_computes(device, shape):
    width, depth, tokens, vocabulary = shape
    with torch.device(device):
        found = workload_of(Transformer(*shape), torch.zeros(2, tokens, dtype=torch.int64))
    known = Workload.transformer(width, depth, tokens, vocabulary)
    assert (found.numel, found.work) == (known.numel, known.work)


def test_shared_parameters_count_where_they_are_used_first_and_their_work_where_it_is_done():
    layers = workload_of(Transformer(16, 1, 8, 20), torch.zeros(1, 8, dtype=torch.int64)).layers
    assert layers[0] == Layer(16 * 20, 0.0)
    assert layers[-1] == Layer(2 * 16, 8.0 * 20 * 16)


TWICE = nn.Linear(4, 4)
FROZEN = nn.Linear(8, 8).requires_grad_(requires_grad=False)
LAYERS = {
    "a module that is called twice is one": (nn.Sequential(TWICE, nn.ReLU(), TWICE), (5, 4), Layer(20, 32.0)),
    "a frozen one only computes": (nn.Sequential(nn.Linear(4, 8), FROZEN), (1, 4), Layer(40, 32.0 + 64.0, 4, 8)),
    "a row is a sample": (nn.Sequential(nn.Flatten(), nn.Linear(24, 2)), (5, 3, 8), Layer(50, 48.0, 24, 2)),
    "a row is a token": (nn.Linear(4, 2), (5, 7, 4), Layer(10, 7 * 8.0)),
    "a row is a token of a batch": (nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 2)), (5, 7, 4), Layer(10, 7 * 8.0)),
    "a convolution has no shape": (nn.Conv2d(3, 4, 3), (5, 3, 8, 8), Layer(112, 36 * 4 * 27.0)),
}


@for_each("what", LAYERS)
def test_a_layer_has_what_is_exchanged_and_what_is_multiplied_for_a_sample(what):
    model, shape, layer = LAYERS[what]
    assert workload_of(model, torch.zeros(shape)).layers == (layer,)


def test_products_without_parameters_belong_to_the_layer_before_them():
    class Products(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            return self[1](x @ x.transpose(1, 2) @ x)

    found = workload_of(Products(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(3, 5, 4))
    assert found.layers == (Layer(20, 5.0 * 16 + 2 * 5 * 5 * 4), Layer(20, 5.0 * 16))


@for_each("device", DEVICES)
def test_attention_counts_with_the_parameters_of_a_part_that_is_never_called(device):
    x = torch.zeros(2, 5, 16, device=device)
    found = workload_of(nn.MultiheadAttention(16, 4, batch_first=True, device=device), (x, x, x))
    assert found.layers == (Layer(4 * 16 * 17, 5.0 * 4 * 16 * 16 + 2 * 5 * 5 * 16),)


@for_each(
    ("kind", "gates", "device"), [(nn.LSTM, 4, "cpu"), (nn.GRU, 3, "cpu"), (nn.RNN, 1, "cpu"), (nn.LSTM, 4, "meta")]
)
def test_recurrent_layers_count_every_step_both_ways(kind, gates, device):
    model = kind(8, 16, num_layers=2, bidirectional=True, batch_first=True, device=device)
    found = workload_of(model, torch.zeros(2, 5, 8, device=device))
    assert found.work == 5.0 * gates * 16 * 2 * ((8 + 16) + (32 + 16))


def test_recurrent_layers_of_a_gpu_count_their_matrices_and_no_biases():
    count = UNCOUNTED[torch.ops.aten._cudnn_rnn]
    assert count((5, 2, 8), [(64, 8), (64, 16), (64,), (64,)], 4) == 2 * 10 * 64 * (8 + 16)


def test_a_compiled_model_is_read_as_the_model_that_it_holds():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    plain, compiled = (workload_of(each, torch.zeros(1, 4)) for each in (model, torch.compile(model, backend="eager")))
    assert compiled == plain


class OfX(nn.Linear):
    def forward(self, x):
        return super().forward(x)


@for_each("batch", [{"x": torch.zeros(6, 4)}, (torch.zeros(6, 4),), torch.zeros(6, 4)])
def test_a_batch_is_a_tensor_or_positional_or_named_arguments_and_work_is_that_of_a_sample(batch):
    assert workload_of(OfX(4, 3), batch).layers == (Layer(15, 12.0),)


class Changing(nn.Module):
    """It counts its calls in a buffer, and draws random numbers in eval mode too."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.parts.train()
        return self.parts(x) + torch.rand(4)


def test_the_model_and_the_random_numbers_stay_as_they_were():
    model, random = Changing(), torch.get_rng_state()
    model.parts[2].eval()
    before = copy.deepcopy(model)
    workload_of(model, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.state_dict().items())
    assert [each.training for each in model.modules()] == [each.training for each in before.modules()]
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


@for_each(
    ("model", "batch", "says"),
    [
        (nn.ReLU(), torch.zeros(1, 4), "ReLU has no parameters that need a gradient"),
        (nn.LazyLinear(4), torch.zeros(1, 4), "LazyLinear has lazy parameters"),
        (nn.Linear(4, 4), torch.zeros(0, 4), "the batch for Linear holds no samples"),
        (nn.Embedding(4, 4), torch.zeros(1, 4, dtype=torch.int64), "one that multiplies"),
        ("text", torch.zeros(2, 4), r"workload_of\(\) of a str: give a torch.nn.Module"),
        (nn.Linear(4, 4), torch.zeros(2, 3), r"Linear does not take the batch \(RuntimeError: .*shapes.*\): give what"),
    ],
)
def test_what_has_no_workload_is_refused_in_words(model, batch, says):
    with pytest.raises(UsageError, match=says):
        workload_of(model, batch)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is")
def test_a_model_that_hides_its_layers_is_refused_in_words():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(UsageError, match="Sequential is compiled by TorchScript, which hides its layers: give the"):
        workload_of(model, torch.zeros(1, 4))


def test_a_saved_workload_is_planned_and_simulated(tmp_path):
    file = tmp_path / "mine.json"
    workload = workload_of(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), torch.zeros(1, 512), name="mine")
    workload.save(file)
    assert Workload.read(file) == workload
    step = "--ranks 8 --compute-ms 30 --model"
    assert told(f"simulate step ring {step}", file)["nbytes"] == 4 * workload.numel
    assert told(f"plan step {step}", file)["best"]["step_seconds"] > 0.03


@for_each(
    ("text", "says"),
    [
        ("", "describes no workload (JSONDecodeError("),
        ('{"name": "a", "layers": [{"numel": 1}]}', "write it with Workload.save, or as {"),
        ('{"name": "a", "layers": [{"numel": 1.5, "work": 1}]}', "layer 0 is {'numel': 1.5, 'work': 1}: give whole"),
        ('{"name": "a", "layers": [{"numel": 0, "work": 1}]}', "a has 0 parameters to exchange and work 1"),
        ('{"name": "[/b]", "layers": [{"numel": 1, "work": 1}]}', "a workload cannot be called '[/b]'"),
    ],
)
def test_a_file_that_describes_no_workload_is_refused_in_words(tmp_path, text, says):
    file = tmp_path / "mine.json"
    file.write_text(text)
    assert says in refused("plan step --compute-ms 30 --model", file)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(commrt.CommrtError, match="could not be written"):
        Workload.named("vgg_a").save(tmp_path / "none" / "mine.json")
