from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgewise.errors import ConfigError, ModelError
from edgewise.model import Graph, Op, TensorSpec, choose_cuts, legal_cuts
from edgewise.model.cuts import cut_runs, settled_cuts
from edgewise.model.graph import einsum_flops


def spec(name: str, *, channels: int = 4, dtype: str = "float32", rank: int = 4) -> TensorSpec:
    return TensorSpec(name=name, shape=(1, channels, 8, 8)[:rank], dtype=dtype)


def op(output: str, *inputs: str, flops: float = 1.0, **more: Any) -> Op:
    return Op(name=output, kind="op", inputs=inputs, outputs=(output,), flops=flops, **more)


def graph(*ops: Op, inputs: tuple[str, ...] = ("x",), outputs: tuple[str, ...] = ()) -> Graph:
    names = [*inputs, *(name for o in ops for name in o.outputs)]
    return Graph(
        inputs=inputs,
        outputs=outputs or ops[-1].outputs[:1],
        ops=ops,
        tensors={name: spec(name) for name in names},
    )


def chain(length: int, *, flops: float = 1.0) -> Graph:
    names = ["x", *(f"t{i}" for i in range(length))]
    return graph(
        *(op(b, a, flops=flops, is_contraction=True) for a, b in itertools.pairwise(names))
    )


def names(g: Graph) -> list[str]:
    return [c.tensor.name for c in legal_cuts(g)]


def separators(g: Graph) -> set[str]:
    """By the definition: tensors without which no output can be reached from any input."""
    written = [name for o in g.ops for name in o.outputs]

    def reachable(without: str | None, *, backwards: bool = False) -> set[str]:
        edges = [(i, o) for node in g.ops for i in node.inputs for o in node.outputs]
        if backwards:
            edges = [(b, a) for a, b in edges]
        found = {n for n in (g.outputs if backwards else g.inputs) if n != without}
        changed = True
        while changed:
            new = {b for a, b in edges if a in found and b != without} - found
            found |= new
            changed = bool(new)
        return found

    on_path = reachable(None) & reachable(None, backwards=True)
    return {
        t
        for t in written
        if t in on_path and t not in g.outputs and not reachable(t) & set(g.outputs)
    }


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any DAG: several inputs, operators of several outputs, constants, dead ends."""
    inputs = tuple(f"x{i}" for i in range(draw(st.integers(1, 2))))
    known = list(inputs)
    ops: list[Op] = []
    for k in range(draw(st.integers(1, 12))):
        # Mostly the last few tensors, so that chains, and with them cuts, are common.
        reads = draw(
            st.lists(st.integers(0, min(3, len(known) - 1)), max_size=2).map(
                lambda back: tuple(dict.fromkeys(known[-1 - b] for b in back))  # noqa: B023
            )
        )
        outputs = tuple(f"t{k}_{j}" for j in range(draw(st.integers(1, 2))))
        ops.append(Op(name=f"o{k}", kind="op", inputs=reads, outputs=outputs))
        known += outputs
    count = draw(st.integers(1, 2))
    written = [name for o in ops for name in o.outputs]
    outputs = tuple(dict.fromkeys(written[-count:]))
    return graph(*ops, inputs=inputs, outputs=outputs)


@settings(deadline=None, max_examples=75)
@given(graphs())
def test_a_cut_is_legal_exactly_if_no_path_leads_around_its_tensor(g: Graph) -> None:
    found = names(g)

    assert set(found) == separators(g)
    assert len(found) == len(set(found))


@settings(deadline=None, max_examples=50)
@given(graphs())
def test_each_slice_between_cuts_is_complete_and_no_operator_on_a_path_is_in_two(g: Graph) -> None:
    if len(g.inputs) > 1:
        return
    bounds = [g.inputs[0], *names(g), g.outputs[0]]
    dependent = set(g.inputs)
    for o in g.ops:
        if dependent & set(o.inputs):
            dependent |= set(o.outputs)
    if g.outputs[0] not in dependent:
        return
    counted: list[int] = []
    for start, stop in itertools.pairwise(bounds):
        piece = g.between(start, stop)
        known = {start}
        for i in piece:
            assert set(g.ops[i].inputs) <= known
            known |= set(g.ops[i].outputs)
        assert stop in known
        counted += [i for i in piece if dependent & set(g.ops[i].outputs)]

    assert len(counted) == len(set(counted))


@settings(deadline=None, max_examples=50)
@given(graphs(), st.randoms(use_true_random=False))
def test_the_order_of_operators_does_not_change_the_cuts(g: Graph, random: Any) -> None:
    pending, known, order = list(g.ops), set(g.inputs), []
    while pending:
        ready = [o for o in pending if set(o.inputs) <= known]
        chosen = random.choice(ready)
        pending.remove(chosen)
        known |= set(chosen.outputs)
        order.append(chosen)

    assert set(names(graph(*order, inputs=g.inputs, outputs=g.outputs))) == set(names(g))


def test_inside_a_residual_block_nothing_is_legal() -> None:
    g = graph(op("a", "x"), op("b", "a"), op("c", "b"), op("sum", "a", "c"), op("y", "sum"))

    assert names(g) == ["a", "sum"]


def test_a_constant_made_early_and_read_late_forbids_no_cut() -> None:
    g = graph(op("mask"), op("a", "x"), op("b", "a"), op("c", "b", "mask"), op("y", "c"))

    assert names(g) == ["a", "b", "c"]
    assert [g.ops[i].name for i in g.between("b", "y")] == ["mask", "c", "y"]


def test_a_size_asked_of_the_input_and_used_late_forbids_the_cuts_between() -> None:
    g = graph(op("size", "x"), op("a", "x"), op("b", "a"), op("y", "b", "size"))

    assert names(g) == []


def test_views_alive_across_a_place_make_their_origin_the_cut() -> None:
    g = graph(
        op("a", "x"),
        op("left", "a", is_view=True),
        op("right", "a", is_view=True),
        op("b", "left"),
        op("c", "right"),
        op("y", "b", "c"),
    )

    assert names(g) == ["a"]


def test_one_output_of_a_split_alone_is_no_cut_while_the_other_is_read() -> None:
    split = Op(name="split", kind="split", inputs=("a",), outputs=("left", "right"))
    g = graph(op("a", "x"), split, op("b", "left"), op("c", "b", "right"), op("y", "c"))

    assert names(g) == ["a", "c"]


def test_an_operator_whose_result_nobody_needs_forbids_no_cut() -> None:
    g = graph(op("a", "x"), op("b", "a"), op("dead", "x"), op("c", "b"), op("y", "c"))

    assert names(g) == ["a", "b", "c"]


def test_integers_and_values_that_are_no_tensor_cannot_cross() -> None:
    g = graph(op("a", "x"), op("b", "a"), op("c", "b"), op("y", "c"))
    tensors = {n: s for n, s in g.tensors.items() if n != "a"} | {"b": spec("b", dtype="int64")}
    g = Graph(inputs=g.inputs, outputs=g.outputs, ops=g.ops, tensors=tensors)

    assert names(g) == ["c"]


def test_other_element_types_cross_where_they_are_asked_for() -> None:
    g = Graph(
        inputs=("x",),
        outputs=("y",),
        ops=(op("a", "x"), op("b", "a"), op("y", "b")),
        tensors={n: spec(n, dtype=d) for n, d in (("a", "int8"), ("b", "float32"))},
    )

    assert names(g) == ["b"]
    assert [c.tensor.name for c in legal_cuts(g, dtypes={"int8"})] == ["a"]


def test_cuts_between_the_same_contractions_are_one_run_of_which_one_settles() -> None:
    g = graph(
        op("c1", "x", is_contraction=True), op("r1", "c1"),
        op("c2", "r1", is_contraction=True), op("c3", "c2", is_contraction=True), op("y", "c3"),
    )  # fmt: skip
    cuts = legal_cuts(g)

    assert [[c.tensor.name for c in run] for run in cut_runs(g, cuts)] == [
        ["c1", "r1"], ["c2"], ["c3"]
    ]  # fmt: skip
    assert [c.tensor.name for c in settled_cuts(g, cuts)] == ["r1", "c2", "c3"]


def test_a_cut_tells_the_work_before_it() -> None:
    cuts = legal_cuts(
        graph(op("a", "x", flops=1.0), op("b", "a", flops=2.0), op("y", "b", flops=5.0))
    )

    assert [(c.flops, c.depth_ratio) for c in cuts] == [(1.0, 0.125), (3.0, 0.375)]


def test_a_count_takes_equal_steps_of_work() -> None:
    chosen = choose_cuts(chain(40), 8)

    assert [c.depth_ratio for c in chosen] == [k / 8 for k in range(1, 8)]


def test_among_near_cuts_the_smaller_tensor_is_taken() -> None:
    g = chain(40)
    tensors = dict(g.tensors) | {"t20": spec("t20", channels=1)}
    g = Graph(inputs=g.inputs, outputs=g.outputs, ops=g.ops, tensors=tensors)

    assert [c.tensor.name for c in choose_cuts(g, 2)] == ["t20"]


def test_a_normalisation_is_not_torn_from_its_convolution() -> None:
    g = graph(
        op("conv1", "x", flops=10, is_contraction=True),
        op("norm1", "conv1"),
        op("relu1", "norm1"),
        op("conv2", "relu1", flops=10, is_contraction=True),
        op("y", "conv2"),
    )

    assert [c.tensor.name for c in choose_cuts(g, [0.4])] == ["relu1"]


def test_fractions_take_the_nearest_cut_and_the_end_needs_none() -> None:
    chosen = choose_cuts(chain(10), [0.9, 0.31, 1.0])

    assert [c.tensor.name for c in chosen] == ["t2", "t8"]


def test_a_vector_is_not_chosen_where_there_are_maps() -> None:
    g = chain(10)
    tensors = dict(g.tensors) | {f"t{k}": spec(f"t{k}", rank=2) for k in range(6, 10)}
    g = Graph(inputs=g.inputs, outputs=g.outputs, ops=g.ops, tensors=tensors)

    assert [c.tensor.name for c in choose_cuts(g, [0.9])] == ["t5"]
    assert [c.tensor.name for c in choose_cuts(g, ["t8"])] == ["t8"]


def test_a_module_name_takes_its_last_cut_and_a_tensor_name_itself() -> None:
    g = graph(
        op("a", "x", scope="features.0"),
        op("b", "a", scope="features.1.conv"),
        op("c", "b", scope="features.1.act"),
        op("d", "c", scope="features.10"),
        op("y", "d", scope="head"),
    )

    assert [c.tensor.name for c in choose_cuts(g, ["features.1"])] == ["c"]
    assert [c.tensor.name for c in choose_cuts(g, "a")] == ["a"]


def test_an_unknown_name_is_refused_with_the_nearest_ones() -> None:
    g = graph(op("a", "x", scope="layer1"), op("b", "a", scope="layer2"), op("y", "b"))

    with pytest.raises(ConfigError, match="'layr2'") as caught:
        choose_cuts(g, ["layr2"])
    assert "'layer2'" in str(caught.value.help)


def test_a_module_inside_which_nothing_is_legal_is_refused() -> None:
    g = graph(op("a", "x", scope="stem"), op("b", "a", scope="block"), op("y", "a", "b"))

    with pytest.raises(ConfigError, match="no legal cut is named 'block'"):
        choose_cuts(g, ["block"])


@pytest.mark.parametrize(
    "exits", [0, -1, [], [0.0], [-0.5], [1.5], [math.nan], [math.inf], [True, 0.0]]
)
def test_counts_below_one_and_fractions_outside_the_model_are_refused(exits: Any) -> None:
    with pytest.raises(ConfigError, match="expected"):
        choose_cuts(chain(4), exits)


def test_one_exit_needs_no_cut_at_all() -> None:
    assert choose_cuts(graph(op("a", "x"), op("y", "a", "x")), 1) == ()


def test_more_exits_than_places_gives_as_many_as_there_are() -> None:
    chosen = choose_cuts(chain(4), 100)

    assert [c.tensor.name for c in chosen] == ["t0", "t1", "t2"]


def test_a_model_without_a_legal_cut_is_refused_with_a_way_out() -> None:
    g = graph(op("a", "x"), op("b", "a"), op("y", "b", "x"))

    with pytest.raises(ModelError, match="no legal cut") as caught:
        choose_cuts(g, 4)
    assert "exits=1" in str(caught.value.help)


def test_a_graph_that_reads_before_it_writes_is_refused() -> None:
    with pytest.raises(ModelError, match="'b' before it is written"):
        graph(op("a", "b"), op("b", "x"))


def test_a_graph_whose_output_nobody_writes_is_refused() -> None:
    with pytest.raises(ModelError, match="'z' is written by no operator"):
        graph(op("a", "x"), outputs=("z",))


def test_a_slice_that_needs_more_than_its_start_is_refused() -> None:
    g = graph(op("a", "x"), op("b", "a"), op("y", "b", "x"))

    with pytest.raises(ModelError, match="cannot be computed from 'a' alone"):
        g.between("a", "y")


def test_bytes_follow_the_element_type() -> None:
    assert spec("a", dtype="float16").nbytes * 2 == spec("a").nbytes == 4 * 4 * 64


def test_einsum_work_is_known_only_for_contractions_of_two() -> None:
    assert einsum_flops("bij, bjk -> bik", [(1, 2, 3), (1, 3, 4)]) == 2 * 2 * 3 * 4
    assert einsum_flops("ij->ji", [(2, 3)]) is None
    assert einsum_flops("...ij,...jk->...ik", [(2, 3), (3, 4)]) is None
    assert einsum_flops("ij,ij->ij", [(2, 3), (2, 3)]) is None
