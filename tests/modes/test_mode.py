"""switch_mode: to eval as the eager model in eval, to the bit; back to train, node for node; what cannot be is told."""

import copy
import operator

import pytest
import torch
from torch import nn
from torch.export.graph_signature import OutputKind
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import torch_batchnorm as tbn
from programs import (
    TENSORS,
    Op,
    call_graph,
    claim_aten,
    export,
    fingerprint,
    modes,
    native,
    nodes,
    same,
    saved_and_loaded,
    step,
    structure,
)
from torch_batchnorm import FORMS, SwitchMode
from torch_batchnorm.decomps.forms import Mode, Statistics
from torch_batchnorm.passes.rewriting.site import find_sites

aten = torch.ops.aten
X = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A batch norm with options of its own, one called twice, one without weights, one frozen; dropouts."""

    def __init__(self):
        super().__init__()
        self.conv, self.last, self.first = nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3), nn.BatchNorm2d(3, 1e-3, 0.03)
        self.plain, self.frozen = nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3)
        self.dropout, self.dropout2d = nn.Dropout(0.3), nn.Dropout2d(0.2)

    def forward(self, input):
        x = self.last(self.first(self.conv(input)).relu())
        return self.dropout2d(self.dropout(self.frozen(self.plain(self.last(x))))), self.first.running_mean * 2

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self


def made(training=True):
    torch.manual_seed(0)
    net = Net().train(training)
    for bn in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        bn.running_mean.normal_(std=0.1)
        bn.running_var.uniform_(0.5, 1.5)
    return net


def program_of(net, decomposed, consolidated=False):
    program = export(net, X)
    program = program.run_decompositions() if decomposed else program
    return tbn.consolidate(program) if consolidated else program


def switched(program, to, **options):
    """Switches a copy, having checked what holds for every program."""
    before = fingerprint(program)
    result = SwitchMode(to, **options)(program)
    assert fingerprint(program) == before, "the input was touched"
    assert SwitchMode(to, **options)(result.program).modified is False
    assert tbn.verify(result.program) == tbn.verify(program)
    if isinstance(program, torch.export.ExportedProgram):
        assert all(result.program.state_dict[k] is v for k, v in program.state_dict.items())
    return result


DIALECTS = pytest.mark.parametrize("decomposed", [False, True], ids=("training IR", "ATEN"))
SPELLINGS = pytest.mark.parametrize("consolidated", [False, True], ids=("legacy", "family"))


@DIALECTS
@SPELLINGS
@pytest.mark.parametrize("unlifted", [False, True], ids=("program", "module"))
def test_to_eval_is_the_eager_eval_model_and_back_is_the_same_graph(decomposed, consolidated, unlifted):
    net = made()
    exported = program_of(net, decomposed, consolidated)
    program = exported.module() if unlifted else exported
    found = switched(program, "eval")
    assert (len(found.edits), found.declined) == (6, ())
    with torch.no_grad():
        assert same((found.program if unlifted else found.program.module())(X), net.eval()(X))
    back = switched(found.program, "train")
    assert (len(back.edits), back.declined, nodes(back.program) == nodes(program)) == (6, (), True)


@DIALECTS
@SPELLINGS
def test_a_round_trip_in_place(decomposed, consolidated):
    program = program_of(made(), decomposed, consolidated)
    before = nodes(program)
    assert tbn.switch_mode(program, "eval", inplace=True) is program
    assert nodes(program) != before
    assert tbn.switch_mode(program, "train", inplace=True) is program
    assert nodes(program) == before


@DIALECTS
@SPELLINGS
def test_a_round_trip_through_a_file(decomposed, consolidated):
    program = program_of(made(), decomposed, consolidated)
    evaluates = saved_and_loaded(tbn.switch_mode(program, "eval"))
    back = switched(evaluates, "train")
    assert (back.declined, nodes(back.program) == nodes(saved_and_loaded(program))) == ((), True)


@DIALECTS
def test_eval_export_trained_is_the_train_export(decomposed):
    class Bare(nn.Sequential):
        def forward(self, x):
            return super().forward(super().forward(x))

    torch.manual_seed(0)
    net = Bare(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False), nn.BatchNorm2d(3))
    want = program_of(copy.deepcopy(net), decomposed)
    found = switched(program_of(net.eval(), decomposed), "train")
    assert (len(found.edits), found.declined) == (4, ())
    assert structure(found.program) == structure(want)
    with torch.set_grad_enabled(not decomposed):
        for program in (found.program, saved_and_loaded(found.program)):
            assert same(step(program.module(), X), step(want.module(), X))


def test_eval_export_trains_as_the_eager_model():
    net = made(False)
    with torch.no_grad():
        found = tbn.switch_mode(export(net, X), "train", include_frozen=True, dropout=False).module()
    nn.Module.train(net)
    net.dropout.eval()
    net.dropout2d.eval()
    assert same(step(found, X), step(net, X))


def test_options_of_a_batch_norm_stay():
    program = export(nn.BatchNorm2d(3, eps=1e-3, momentum=0.03), X)
    for to in ("eval", "train", "eval"):
        program = tbn.switch_mode(program, to)
        (entry,) = tbn.inspect(program).entries
        assert (entry.mode, entry.eps, entry.momentum, entry.node) == (to, 1e-3, 0.03, "batch_norm")


# Frozen: what is in eval inside a program that trains.


@DIALECTS
@pytest.mark.parametrize("saved", [False, True], ids=("in memory", "saved"))
def test_a_frozen_batch_norm_stays_frozen(decomposed, saved):
    program = program_of(made(), decomposed)
    evaluates = tbn.switch_mode(program, "eval")
    evaluates = saved_and_loaded(evaluates) if saved else evaluates
    assert _modes(tbn.switch_mode(evaluates, "train"))["frozen"] == "eval"
    assert _modes(tbn.switch_mode(evaluates, "train", include_frozen=True))["frozen"] == "train"
    assert SwitchMode("train")(program).modified is False
    assert _modes(tbn.switch_mode(program, "train", include_frozen=True))["frozen"] == "train"


def _modes(program):
    return {entry.module.rpartition("@")[0] or entry.module: entry.mode for entry in tbn.inspect(program).entries}


def test_frozen_survives_consolidating_and_legalizing_in_between():
    program = tbn.switch_mode(program_of(made(), True), "eval")
    other = tbn.legalize(tbn.consolidate(program), "core_aten")
    assert _modes(tbn.switch_mode(other, "train")) == _modes(program_of(made(), True))
    family = tbn.switch_mode(tbn.consolidate(program), "train")
    assert structure(family) == structure(program_of(made(), True, True))


def test_all_frozen_under_a_dropout_that_trains_stays_frozen():
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout())
    net[0].eval()
    program = tbn.switch_mode(export(net, X), "eval")
    assert _modes(tbn.switch_mode(program, "train")) == {"0": "eval"}


# What means the batch's statistics.


class Standardised(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 2, 2))

    def forward(self, x):
        weight = functional.batch_norm(self.weight.view(1, 3, -1), None, None, training=True).view_as(self.weight)
        return functional.conv2d(x, weight)


BATCH = {
    "no running statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm2d(3, affine=True),
    "weight standardisation": Standardised,
}


@DIALECTS
@pytest.mark.parametrize("name", BATCH)
@pytest.mark.parametrize("to", ["eval", "train"])
def test_batch_statistics_are_not_switched(decomposed, name, to):
    for training in (True, False):
        result = SwitchMode(to)(program_of(BATCH[name]().train(training), decomposed))
        assert (result.modified, result.declined) == (False, ())


# Counters.


def _mutations(program):
    specs = program.graph_signature.output_specs
    return [spec.target for spec in specs if spec.kind is not OutputKind.USER_OUTPUT]


def test_counter_mutations_and_outputs():
    program = program_of(made(), True)
    evaluates = tbn.switch_mode(program, "eval")
    assert (_mutations(evaluates), len(evaluates.graph_signature.user_outputs)) == ([], 2)
    assert not evaluates.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert _mutations(tbn.switch_mode(evaluates, "train")) == _mutations(program) != []


class Lifted(nn.BatchNorm2d):
    """A counter whose 1 is a tensor: torch lifts it to a constant."""

    def forward(self, x):
        self.num_batches_tracked.add_(torch.tensor(1))
        return functional.batch_norm(x, self.running_mean, self.running_var, training=self.training), x + 1


@DIALECTS
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("saved", [False, True], ids=("in memory", "saved"))
def test_a_lifted_one_goes_with_its_add_and_comes_back(decomposed, inplace, saved):
    program = program_of(Lifted(3, affine=False), decomposed)
    before, constants = nodes(saved_and_loaded(program) if saved else program), dict(program.constants)
    assert len(constants) == 1
    evaluates = tbn.switch_mode(program, "eval", inplace=inplace)
    assert (dict(evaluates.constants), tbn.verify(evaluates)) == ({}, ())
    evaluates = saved_and_loaded(evaluates) if saved else evaluates
    assert not [s for s in evaluates.graph_signature.input_specs if "lifted" in str(s.target)]
    back = tbn.switch_mode(evaluates, "train", inplace=inplace)
    assert (nodes(back), same(dict(back.constants), constants)) == (before, True)
    with torch.no_grad():
        for _ in range(2):
            back.module()(X)
    assert back.state_dict["num_batches_tracked"] == 2


def test_adds_that_are_not_one_for_each_batch_norm_are_declined():
    class Twice(nn.BatchNorm2d):
        def forward(self, x):
            self.num_batches_tracked.add_(1)
            return super().forward(x)

    result = SwitchMode("eval")(export(Twice(3), X))
    assert [d.reason for d in result.declined] == [
        "num_batches_tracked is added to 2 times for 1 batch norms: which add is whose is not known"
    ]


def test_a_counter_that_is_returned():
    class Counted(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x), self.num_batches_tracked + 1

    for decomposed in (False, True):
        program = program_of(Counted(3), decomposed)
        evaluates = tbn.switch_mode(program, "eval")
        with torch.no_grad():
            assert same(evaluates.module()(X), Counted(3).eval()(X))
        assert nodes(tbn.switch_mode(evaluates, "train")) == nodes(program)


# Dropout and the like.


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x * 1, self.training)


def _depth(x, training):
    if not training:
        return x + 0
    return x / 0.8 * torch.floor(0.8 + torch.rand(4, 1, 1, 1))


def _survival(x, training):
    if not training:
        return x + 0
    return x * x.new_empty(4, 1, 1, 1).bernoulli_(0.8).div_(0.8)


def _attention(x, training):
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.4 if training else 0.0)


RANDOM = {
    "dropout": lambda x, t: functional.dropout(x, 0.3, t),
    "dropout in place": lambda x, t: functional.dropout(x, 0.3, t, inplace=True),
    "dropout2d": lambda x, t: functional.dropout2d(x, 0.3, t),
    "alpha_dropout": lambda x, t: functional.alpha_dropout(x, 0.3, t),
    "feature_alpha_dropout": lambda x, t: functional.feature_alpha_dropout(x, 0.3, t),
    "native_dropout": lambda x, t: aten.native_dropout(x, 0.3, t)[0],
    "rrelu": lambda x, t: functional.rrelu(x, 0.1, 0.5, t),
    "attention": _attention,
    "stochastic depth by rand": _depth,
    "stochastic depth by bernoulli": _survival,
}


@pytest.mark.parametrize("name", RANDOM)
def test_what_draws_random_numbers_follows(name):
    module = Function(RANDOM[name])
    program = export(module, X)
    found = switched(program, "eval")
    assert (len(found.edits), found.declined) == (1, ())
    assert same(found.program.module()(X), module.eval()(X))
    assert nodes(tbn.switch_mode(found.program, "train")) == nodes(program)
    again = tbn.switch_mode(saved_and_loaded(found.program), "train")
    assert nodes(again) == nodes(saved_and_loaded(program))
    assert SwitchMode("eval", dropout=False)(program).modified is False


@pytest.mark.parametrize("name", ["dropout", "dropout2d", "native_dropout", "rrelu", "stochastic depth by bernoulli"])
def test_what_draws_random_numbers_follows_when_it_is_decomposed(name):
    module = Function(RANDOM[name])
    program = export(module, X).run_decompositions()
    found = switched(program, "eval")
    assert (len(found.edits), found.declined) == (1, ())
    assert same(found.program.module()(X), module.eval()(X))
    assert nodes(tbn.switch_mode(found.program, "train")) == nodes(program)


def test_decomposed_randomness_that_cannot_be_told_is_declined():
    result = SwitchMode("eval")(export(Function(RANDOM["alpha_dropout"]), X).run_decompositions())
    (declined,) = result.declined
    assert (result.modified, declined.site) == (False, "bernoulli")
    assert "what stands in its place in the other mode is not in the program" in declined.reason


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch, of its own recurrent nets
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_dropout_of_a_recurrent_net_follows(kind):
    torch.manual_seed(0)
    net = kind(3, 4, num_layers=2, dropout=0.5)
    x = torch.randn(5, 2, 3)
    program = export(net, x)
    found = switched(program, "eval")
    assert (len(found.edits), found.declined) == (1, ())
    assert same(found.program.module()(x), net.eval()(x))
    assert nodes(tbn.switch_mode(found.program, "train")) == nodes(program)


def test_the_probability_of_an_attention_exported_in_eval_is_not_known():
    result = SwitchMode("train")(export(Function(_attention).eval(), X))
    assert [(d.reason, d.remedy) for d in result.declined] == [
        ("with which probability it drops in training is not in the program", "export the program in training")
    ]


# Every form, hand-built.


def _name(form):
    return form.name


SWITCHABLE = [form for form in FORMS if "running_mean" in form.arguments and form.statistics is not Statistics.NONE]


@pytest.mark.parametrize("keywords", [False, True], ids=("positional", "keywords"))
@pytest.mark.parametrize("form", SWITCHABLE, ids=_name)
def test_every_form_to_eval_and_back(form, keywords):
    unread = [role for role in form.roles if role.startswith("save") or role in ("reserve", "impl_index")]
    module = call_graph(form, True, keywords=keywords, unread=unread)
    found = switched(module, "eval")
    assert (len(found.edits), found.declined) == (1, ())
    (site,) = find_sites([("", found.program.graph)])
    assert (site.norm.training, site.norm.eps, site.norm.momentum) == (False, 1e-5, 0.1)
    assert nodes(switched(found.program, "train").program) == nodes(module)
    if torch.device("cpu") and not form.name.startswith(("aten.cudnn", "aten.miopen")) and not form.destinations:
        tensors = [torch.randn(4, 3, 2), *torch.rand(4, 3)]
        want = torch.batch_norm(tensors[0], *tensors[1:], False, 0.1, 1e-5, False)
        with torch.no_grad():
            assert same(torch.utils._pytree.tree_leaves(found.program(*tensors))[0], want)


@pytest.mark.parametrize("form", [f for f in FORMS if False in modes(f) and "running_mean" in f.arguments], ids=_name)
def test_every_eval_form_trains(form):
    unread = [role for role in form.roles if role.startswith("save") or role in ("reserve", "impl_index")]
    found = switched(call_graph(form, False, unread=unread), "train")
    assert (len(found.edits), found.declined) == (1, ())
    (site,) = find_sites([("", found.program.graph)])
    assert (site.norm.training, site.form.mode in (Mode.TRAIN, Mode.FLAG)) == (True, True)


def test_a_hidden_write_of_a_functional_program():
    program = claim_aten(export(Op(native), torch.randn(4, 3)))
    evaluates = tbn.switch_mode(program, "eval")
    assert nodes(tbn.switch_mode(evaluates, "train")) == nodes(program)
    fresh = claim_aten(export(Op(lambda *t: aten.native_batch_norm(*t, False, 0.1, 1e-5)[0]), torch.randn(4, 3)))
    assert [(d.reason, d.remedy) for d in SwitchMode("train")(fresh).declined] == [
        (
            "aten.native_batch_norm.default writes its statistics, which a functional program may not",
            "legalize it to core_aten",
        )
    ]


# Declined.


def _read(role, form=aten.native_batch_norm.default):
    return call_graph(next(f for f in FORMS if f.overload is form), True, unread={"save_mean", "save_invstd"} - {role})


@pytest.mark.parametrize("role", ["save_mean", "save_invstd"])
def test_saved_statistics_that_something_reads_are_declined(role):
    result = SwitchMode("eval")(_read(role))
    assert [d.reason for d in result.declined] == [
        f"its {role} is read by output (output), and is another value in the other mode"
    ]


def test_a_mode_that_is_no_literal_is_declined():
    graph = Graph()
    tensors = [graph.placeholder(name) for name in (*TENSORS, "training")]
    graph.output(graph.call_function(aten.batch_norm.default, (*tensors, 0.1, 1e-5, False)))
    for to in ("eval", "train"):
        (declined,) = SwitchMode(to)(GraphModule({}, graph)).declined
        assert "training is the value of node training" in declined.reason


def test_one_value_a_channel_cannot_train():
    result = SwitchMode("train")(export(nn.BatchNorm1d(3).eval(), torch.randn(1, 3)))
    assert [d.reason for d in result.declined] == [
        "its input [1, 3] has one value a channel: batch statistics are not defined"
    ]


def test_a_mode_that_does_not_exist():
    with pytest.raises(tbn.InvalidChoice, match="found mode 'test', expected one of eval, train"):
        tbn.switch_mode(export(nn.BatchNorm2d(3), X), "test")
    with pytest.raises(tbn.InvalidProgram, match="expected an ExportedProgram or a GraphModule"):
        tbn.switch_mode(nn.BatchNorm2d(3), "eval")


# Gradients in the same graph.


def _joint(training):
    def run(x, w, b, mean, var):
        out = functional.batch_norm(x, mean, var, w, b, training)
        return out, torch.autograd.grad(out.sin().sum(), [x, w, b])

    torch.manual_seed(0)
    tensors = [t.requires_grad_() for t in (torch.randn(4, 3), torch.rand(3), torch.rand(3))]
    inputs = (*tensors, torch.rand(3), torch.rand(3))
    return make_fx(run)(*inputs), [t.detach().clone() for t in inputs]


@pytest.mark.parametrize("consolidated", [False, True], ids=("legacy", "family"))
def test_gradients_follow_their_forward(consolidated):
    joint, inputs = _joint(True)
    want = _joint(False)[0](*inputs)
    module = tbn.consolidate(joint) if consolidated else joint
    found = switched(module, "eval")
    assert (len(found.edits), found.declined) == (1, ())
    with torch.no_grad():
        assert same(found.program(*inputs), want)
    assert nodes(tbn.switch_mode(found.program, "train")) == nodes(module)


# Nested graphs.


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.bn(self.conv(x)) + 1


class NoGrad(Autocast):
    def forward(self, x):
        with torch.no_grad():
            y = self.bn(x)
        return self.conv(y)


class Cond(Autocast):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.bn(y) + 1, lambda y: self.bn(y * 2), (self.conv(x),))


@pytest.mark.parametrize("kind", [Autocast, NoGrad])
def test_nested_graphs_follow(kind):
    torch.manual_seed(0)
    net = kind()
    program = export(net, X)
    found = switched(program, "eval")
    assert (len(found.edits), found.declined) == (1, ())
    with torch.no_grad():
        assert same(found.program.module()(X), copy.deepcopy(net).eval()(X))
    assert nodes(tbn.switch_mode(found.program, "train")) == nodes(program)
    assert nodes(tbn.switch_mode(saved_and_loaded(found.program), "train")) == nodes(saved_and_loaded(program))


@pytest.mark.parametrize("kind", [Autocast, NoGrad])
def test_a_nested_eval_export_trains_and_counts(kind):
    torch.manual_seed(0)
    net = kind()
    found = switched(export(copy.deepcopy(net).eval(), X), "train")
    assert (len(found.edits), found.declined) == (1, ())
    want = step(export(net, X).module(), X)
    assert want[1]["bn.num_batches_tracked"] == 1
    assert same(step(found.program.module(), X), want)


def test_a_branch_that_may_not_run_cannot_train():
    result = SwitchMode("train")(export(Cond().eval(), X))
    assert {d.reason for d in result.declined} == {
        "its graph true_graph_0 is called by cond, which may not run it once for each batch",
        "its graph false_graph_0 is called by cond, which may not run it once for each batch",
    }


def test_a_dynamic_batch_follows():
    net = made()
    program = export(net, X, dynamic=({0: torch.export.Dim("batch", min=2)},))
    evaluates = tbn.switch_mode(program, "eval")
    with torch.no_grad():
        assert same(evaluates.module()(torch.cat([X, X])), net.eval()(torch.cat([X, X])))
    assert nodes(tbn.switch_mode(evaluates, "train")) == nodes(program)


def test_the_statistics_stay_and_do_not_move_in_eval():
    program = tbn.switch_mode(export(made(), X), "eval")
    before = {k: v.clone() for k, v in program.state_dict.items()}
    program.module()(X)
    assert same(dict(program.state_dict), before)


class OnInputs(nn.Module):
    def forward(self, x, mean, var):
        return functional.batch_norm(x, mean, var, training=self.training)


def test_statistics_that_are_inputs():
    inputs = (torch.randn(4, 3), torch.zeros(3), torch.ones(3))
    program = export(OnInputs(), *inputs).run_decompositions()
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    assert kinds == [OutputKind.USER_INPUT_MUTATION] * 2 + [OutputKind.USER_OUTPUT]
    found = switched(program, "eval")
    assert [spec.kind for spec in found.program.graph_signature.output_specs] == [OutputKind.USER_OUTPUT]
    assert nodes(tbn.switch_mode(found.program, "train")) == nodes(program)
    trains = tbn.switch_mode(export(OnInputs().eval(), *inputs).run_decompositions(), "train")
    assert [spec.kind for spec in trains.graph_signature.output_specs] == kinds


@pytest.mark.parametrize("saved", [False, True], ids=("in memory", "saved"))
def test_a_dropout_exported_in_eval_stays_so(saved):
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(), nn.Dropout(0.2))
    net[1].eval()
    program = export(net, X)
    evaluates = tbn.switch_mode(program, "eval")
    evaluates = saved_and_loaded(evaluates) if saved else evaluates
    trains = tbn.switch_mode(evaluates, "train")
    assert [n.args[2] for n in trains.graph.find_nodes(op="call_function", target=aten.dropout.default)] == [
        False,
        True,
    ]
    assert nodes(trains) == nodes(saved_and_loaded(program) if saved else program)


def test_a_strict_export_follows():
    net = made()
    program = torch.export.export(net, (X,), strict=True)
    evaluates = tbn.switch_mode(program, "eval")
    with torch.no_grad():
        assert same(evaluates.module()(X), net.eval()(X))
    assert nodes(tbn.switch_mode(evaluates, "train")) == nodes(program)


def test_a_graph_that_reads_old_statistics_later_is_declined():
    """Hand-built: eval has one value of them only, and the way back could not tell which was read."""
    graph = Graph()
    tensors = [graph.placeholder(name) for name in TENSORS]
    call = graph.call_function(aten._native_batch_norm_legit_functional.default, (*tensors, True, 0.1, 1e-5))
    out, mean = (graph.call_function(operator.getitem, (call, index)) for index in (0, 3))
    graph.output((out, mean, graph.call_function(aten.mul.Tensor, (tensors[3], 2))))
    (declined,) = SwitchMode("eval")(GraphModule({}, graph)).declined
    assert declined.reason == "mul_tensor reads running_mean as it was before the update: in eval there is no other"


def test_the_mutations_of_a_program_keep_their_order():
    """Not torch.export's order, which a program from elsewhere need not have."""
    program = program_of(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3)), True)
    output = program.graph.output_node()
    output.args = ((*reversed(output.args[0][:6]), output.args[0][6]),)
    specs = program.graph_signature.output_specs
    specs[:6] = specs[5::-1]
    program.graph_module.recompile()
    assert nodes(tbn.switch_mode(tbn.switch_mode(program, "eval"), "train")) == nodes(program)


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.bn(x)


def _in_eval(program):
    return tbn.switch_mode(program, "eval")


# A program that was put in eval in one dialect and trains in another: what it remembers is the other one's.
MOVED = {
    "decomposed in eval": lambda p: _in_eval(p).run_decompositions(),
    "legalized to functional in eval": lambda p: tbn.legalize(_in_eval(p), "functional"),
    "legalized to training in eval": lambda p: tbn.legalize(_in_eval(p.run_decompositions()), "training"),
    "consolidated, and legalized to training": lambda p: tbn.legalize(
        _in_eval(tbn.consolidate(p.run_decompositions())), "training"
    ),
    "legalized to composite": lambda p: tbn.legalize(_in_eval(p.run_decompositions()), "composite"),
    "frozen, then decomposed": lambda p: tbn.freeze(p).run_decompositions(),
}


@pytest.mark.parametrize("moved", MOVED.values(), ids=MOVED)
def test_a_program_whose_dialect_changed_in_eval_trains(moved):
    torch.manual_seed(0)
    model = Single()
    program = tbn.switch_mode(moved(export(model, X)), "train", include_frozen=True)
    assert tbn.verify(program) == ()
    module, eager = saved_and_loaded(program).module(), copy.deepcopy(model)
    module(X), eager(X)
    assert all(same(module.get_buffer(name), buffer) for name, buffer in eager.named_buffers())


def test_momentum_none_in_eval_does_not_say_how_it_trains():
    result = SwitchMode("train")(export(nn.BatchNorm2d(3, momentum=None).eval(), X))
    assert not result.modified
    assert [(d.reason, d.remedy) for d in result.declined] == [
        ("its momentum is 0, as torch writes momentum=None in eval", "export in training, with tbn.exportable")
    ]


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.c.running_mean, self.c.running_var = self.a.running_mean, self.a.running_var

    def forward(self, x):
        return self.c(self.a(x))


def test_whose_counter_shared_statistics_move_is_not_guessed():
    result = SwitchMode("train")(export(Shared().eval(), X))
    assert "its statistics are shared by a, c: whose counter it adds to is not known" in {
        d.reason for d in result.declined
    }


def test_the_metadata_of_a_counter_s_add_comes_back():
    program = export(Single(), X)
    (add,) = program.graph.find_nodes(op="call_function", target=aten.add_.Tensor)
    add.meta["custom"] = {"mine": 1}
    (back,) = tbn.switch_mode(_in_eval(program), "train").graph.find_nodes(op="call_function", target=aten.add_.Tensor)
    assert back.meta["custom"] == {"mine": 1}


def _hand_built(target, args, kwargs=None):
    """A module of one call on TENSORS, whose placeholders stand for `args` by name."""
    graph = Graph()
    named = {name: graph.placeholder(name) for name in TENSORS}
    call = graph.call_function(
        target, tuple(named.get(a, a) for a in args), {k: named.get(v, v) for k, v in (kwargs or {}).items()}
    )
    return graph, call


def test_two_reads_of_one_new_statistic_come_back_as_they_stood():
    """Users are listed as they were made, which here is not as they run: the first to run is the one that is read."""
    graph, call = _hand_built(aten._native_batch_norm_legit_functional.default, (*TENSORS, True, 0.1, 1e-5))
    out, unread = (graph.call_function(operator.getitem, (call, index)) for index in (0, 3))
    with graph.inserting_before(unread):
        read = graph.call_function(operator.getitem, (call, 3))
    graph.output((out, read))
    module = GraphModule({}, graph)
    before = nodes(module)
    tbn.switch_mode(module, "eval", inplace=True)  # a copy's users are listed as they run
    assert [n.name for n in module.graph.output_node().args[0]] == ["getitem", "running_mean"]
    assert nodes(tbn.switch_mode(module, "train", inplace=True)) == before


@pytest.mark.parametrize("count", [5, 6, 8])
def test_arguments_stay_by_position_or_by_keyword_as_they_were_given(count):
    """The mode is the sixth: the first one by keyword, the last one by position, or one of many."""
    names = ("training", "momentum", "eps", "cudnn_enabled")
    values = (*TENSORS, True, 0.1, 1e-5, False)
    graph, call = _hand_built(
        aten.batch_norm.default, values[:count], dict(zip(names[count - 5 :], values[count:], strict=True))
    )
    graph.output(call)
    module = GraphModule({}, graph)
    evaluates = switched(module, "eval").program
    (norm,) = evaluates.graph.find_nodes(op="call_function", target=aten.batch_norm.default)
    assert (len(norm.args), [*norm.kwargs]) == (count, [*names[count - 5 :]])
    assert [*norm.args[5:], *norm.kwargs.values()] == [False, 0.1, 1e-5, False]
    assert nodes(switched(evaluates, "train").program) == nodes(module)


# A program that trains: one rule for every pass.


def _beside_dropout(training):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Dropout())
    net[1].eval()
    net[2].train(training)
    return export(net, X)


def test_a_batch_norm_in_eval_beside_a_dropout_that_trains_is_frozen_for_every_pass():
    program = _beside_dropout(True)
    assert SwitchMode("train")(program).modified is False
    assert tbn.Recalibrate()(program, [X]).modified is False
    assert [e.after for e in tbn.Unfreeze()(program).edits] == ["aten.batch_norm.default (train)"]
    (declined,) = tbn.Fold()(program).declined
    assert declined.reason.startswith("it is frozen in a program that trains")
    assert len(tbn.Fold(force=True)(program).edits) == 1
    evaluates = tbn.switch_mode(program, "eval")
    assert (len(tbn.Fold()(evaluates).edits), len(tbn.Recalibrate()(evaluates, [X]).edits)) == (1, 0)


def test_beside_a_dropout_in_eval_it_is_not():
    program = _beside_dropout(False)
    assert len(SwitchMode("train")(program).edits) == 2
    assert len(tbn.Recalibrate()(program, [X]).edits) == 1
    assert len(tbn.Fold()(program).edits) == 1


def test_beside_a_batch_norm_whose_mode_is_no_literal_it_is_frozen():
    graph = Graph()
    tensors = [graph.placeholder(name) for name in (*TENSORS, "training")]
    first = graph.call_function(aten.batch_norm.default, (*tensors, 0.1, 1e-5, False))
    second = graph.call_function(aten.batch_norm.default, (first, *tensors[1:5], False, 0.1, 1e-5, False))
    graph.output(second)
    result = SwitchMode("train")(GraphModule({}, graph))
    assert (result.modified, [d.site for d in result.declined]) == (False, ["batch_norm_default"])
    assert len(SwitchMode("train", include_frozen=True)(GraphModule({}, graph)).edits) == 1


# What is declined is left as it was, in place too.


@pytest.mark.parametrize("inplace", [False, True])
def test_a_program_of_which_all_is_declined_is_not_marked(inplace):
    net = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    net[0].eval()
    program = export(net, X)
    (add,) = program.graph.find_nodes(op="call_function", target=aten.add_.Tensor)
    with program.graph.inserting_before(add):
        program.graph.call_function(aten.add_.Tensor, add.args)
    before = fingerprint(program)
    result = SwitchMode("eval", inplace=inplace)(program)
    assert (result.modified, len(result.declined), fingerprint(program)) == (False, 1, before)
