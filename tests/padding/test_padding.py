"""What graphs prove about calls of other sizes: ONNX graphs, whose proofs runs confirm, and graphs of ATen calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from string import Template
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from nimblec.padding.aten_graph import prove_aten
from nimblec.padding.onnx_graph import prove_onnx
from nimblec.padding.values import Proof
from nimblec.pytorch.aten_graph import trace
from nimblert.plan import Fit

EXACT, PADDED, SPLIT = Fit

SIZES = {"N": 4, "T": 6}
"""Other axes of the models have these sizes, too."""

PARTS = {
    "ROWS": "g (float[N,4] x) => (float[N,4] y)",
    "SEQUENCE": "g (float[N,T,4] x) => (float[N,T,4] y)",
    "MASKED": "g (float[N,T] x, float[N,T] mask) => (float[N,T] y)",
    "ONE": "<float one={1.0}, float k={255.0}",
    "LOW": "<float one={1.0}, float low={-10000.0}",
    "INTS": "<int64 zero={0}, int64 one={1}, int64[1] zeros={0}, int64[1] ones={1}, int64[1] three={3}",
    "SCORES": "g (float[N,T,4] q, float[N,T,4] v, float[N,T] mask) => (float[N,T,4] y)",
    "PRODUCT": "k = Transpose<perm=[0,2,1]>(q) s = MatMul(q, k)",
    "WEIGHTS": "w = Softmax<axis=-1>(m) y = MatMul(w, v)",
    "BIAS": "n = Sub(one, mask) l = Mul(n, low) b = Unsqueeze(l, ones) m = Add(s, b)",
    "LINES": "g (float[N,4,T] x) => (float[N,4,T] y)",
    "KERNEL": "<float[4,4,3] w={" + ",".join(["0.5", "-1", "2"] * 16) + "}",
    "FOUR": "<float[4] s={1,2,3,4}, float[4] b={0,1,0,2}, float[4] m={0,0,1,1}, float[4] v={1,2,1,2}",
    "BODY": "body = b (int64 i, bool c, float[N,4] s) => (bool d, float[N,4] t) { d = Identity(c) t = ",
    "LSTM": f"<float[1,8,4] w={{{','.join(['0.1', '-0.2'] * 16)}}}, float[1,8,2] r={{{','.join(['0.3', '0.1'] * 8)}}}",
}

MODELS = """
Relu: N SPLIT
    $ROWS { y = Relu(x) }

arithmetic with a weight: N SPLIT
    $ROWS <float[4] w={1,2,3,4}> { y = Add(x, w) }

a scalar of another input: N SPLIT
    g (float[N,4] x, float[1] a) => (float[N,4] y) { y = Mul(x, a) }

an outer product: N PADDED
    g (float[N,4] x) => (float[N,N] y) { t = Transpose(x) y = MatMul(x, t) }

a sum with its transpose: N PADDED
    g (float[N,N] x) => (float[N,N] y) { t = Transpose(x) y = Add(x, t) }

its place: N PADDED
    $ROWS $INTS> { s = Shape<end=1>(x) e = Squeeze(s) r = Range(zero, e, one) f = Cast<to=1>(r) c = Unsqueeze(f,
    ones) y = Add(x, c) }

a number repeated as often: N SPLIT
    g (float[N,4] x, float[1,1] a) => (float[N,5] y) $INTS> { s = Shape<end=1>(x) t = Concat<axis=0>(s, ones) e
    = Expand(a, t) y = Concat<axis=1>(x, e) }

a number repeated as often, in front: N SPLIT
    g (float[N,3,4] x, float[1,1,4] a) => (float[N,4,4] y) $INTS> { s = Shape<end=1>(x) r = Concat<axis=0>(s,
    ones, ones) e = Expand(a, r) y = Concat<axis=1>(e, x) }

another rank: N SPLIT
    $ROWS $INTS> { u = Unsqueeze(x, ones) s = Squeeze(u, ones) y = Neg(s) }

one input of rows, one of columns: N SPLIT, T SPLIT
    g (float[N,4] x, float[T,4] z) => (float[N,T] y) { t = Transpose(z) y = MatMul(x, t) }

the maximum chooses, by Where: N EXACT
    $ROWS $ONE> { m = ReduceMax<keepdims=0>(x) c = Greater(m, one) d = Div(x, k) y = Where(c, d, x) }

the maximum chooses, by If: N EXACT
    $ROWS $ONE> { m = ReduceMax<keepdims=0>(x) c = Greater(m, one) y = If(c) <then_branch = a () => (float[N,4]
    o) { o = Div(x, k) }, else_branch = b () => (float[N,4] p) { p = Identity(x) }> }

another input chooses, by If: N SPLIT
    g (float[N,4] x, bool c) => (float[N,4] y) { y = If(c) <then_branch = a () => (float[N,4] o) { o = Neg(x) },
    else_branch = b () => (float[N,4] p) { p = Identity(x) }> }

the maximum of each row chooses: N SPLIT
    $ROWS $ONE, int64[1] a={1}> { m = ReduceMax(x, a) c = Greater(m, one) d = Div(x, k) y = Where(c, d, x) }

less the mean of all: N EXACT
    $ROWS $INTS> { m = ReduceMean(x, zeros) y = Sub(x, m) }

less the mean of each: N SPLIT
    $ROWS $INTS> { m = ReduceMean(x, ones) y = Sub(x, m) }

a sum of zeros: N SPLIT, T PADDED
    g (float[N,T] x, float[N,T] mask) => (float[N,1] y) $INTS> { m = Mul(x, mask) y = ReduceSum(m, ones) }

a sum of what zeros became: N SPLIT, T EXACT
    g (float[N,T] x, float[N,T] mask) => (float[N,1] y) $INTS> { m = Mul(x, mask) e = Exp(m) y = ReduceSum(e,
    ones) }

a maximum of zeros: N SPLIT, T EXACT
    g (float[N,T] x, float[N,T] mask) => (float[N,1] y) $INTS> { m = Mul(x, mask) y = ReduceMax(m, ones) }

the mean under a mask: N SPLIT, T PADDED
    g (float[N,T] x, float[N,T] mask) => (float[N,1] y) $INTS> { m = Mul(x, mask) s = ReduceSum(m, ones) c =
    ReduceSum(mask, ones) y = Div(s, c) }

the maximum under a mask: N SPLIT, T PADDED
    g (float[N,T] x, bool[N,T] mask) => (float[N,1] y) <float low={-1e9}, int64[1] ones={1}> { m = Where(mask,
    x, low) y = ReduceMax(m, ones) }

whether any is left: N SPLIT, T PADDED
    g (float[N,T] x, bool[N,T] mask) => (bool[N,1] y) <float k={0.5}, int64[1] ones={1}> { g = Greater(x, k) a =
    And(g, mask) y = ReduceMax(a, ones) }

a sum over both axes: N PADDED, T PADDED
    g (float[N,T] x, float[N,T] mask) => (float[N,T] y) $INTS> { m = Mul(x, mask) s = ReduceSum<keepdims=0>(m) y
    = Add(m, s) }

ArgMax of each: N SPLIT
    g (float[N,4] x) => (int64[N,1] y) { y = ArgMax<axis=1>(x) }

ArgMax of all: N EXACT
    $ROWS { a = ArgMax<axis=0>(x) f = Cast<to=1>(a) y = Add(x, f) }

TopK of each: N SPLIT
    g (float[N,4] x) => (float[N,3] y) $INTS> { y, i = TopK<axis=1>(x, three) }

CumSum over all: N PADDED
    $ROWS $INTS> { y = CumSum(x, zero) }

CumSum over all, backward: N EXACT
    $ROWS $INTS> { y = CumSum<reverse=1>(x, zero) }

CumSum over zeros, backward: N SPLIT, T PADDED
    $MASKED $INTS> { m = Mul(x, mask) y = CumSum<reverse=1>(m, one) }

CumSum over each: N SPLIT
    $ROWS $INTS> { y = CumSum(x, one) }

Softmax over all: N EXACT
    $ROWS { y = Softmax<axis=0>(x) }

Softmax over each: N SPLIT
    $ROWS { y = Softmax<axis=1>(x) }

Softmax under a mask: N SPLIT, T PADDED
    $MASKED $LOW> { n = Sub(one, mask) b = Mul(n, low) s = Add(x, b) y = Softmax<axis=1>(s) }

Softmax under a mask too weak: N SPLIT, T EXACT
    $MASKED <float one={1.0}, float low={-10.0}> { n = Sub(one, mask) b = Mul(n, low) s = Add(x, b) y =
    Softmax<axis=1>(s) }

Softmax under a mask, the wrong way: N SPLIT, T EXACT
    $MASKED $LOW> { b = Mul(mask, low) s = Add(x, b) y = Softmax<axis=1>(s) }

attention: N SPLIT, T EXACT
    $SCORES $INTS> { $PRODUCT m = Identity(s) $WEIGHTS }

attention under a mask: N SPLIT, T PADDED
    $SCORES $LOW, int64[1] ones={1}> { $PRODUCT $BIAS $WEIGHTS }

attention under a mask, by Where: N SPLIT, T PADDED
    g (float[N,T,4] q, float[N,T,4] v, bool[N,T] mask) => (float[N,T,4] y) <float low={-1e30}, int64[1]
    ones={1}> { $PRODUCT b = Unsqueeze(mask, ones) m = Where(b, s, low) $WEIGHTS }

attention to what came before: N SPLIT, T PADDED
    $SCORES <float low={-1e30}, int64 zero={0}, int64 one={1}, int64[1] ones={1}> { $PRODUCT t = Shape<start=1,
    end=2>(q) e = Squeeze(t) r = Range(zero, e, one) c = Unsqueeze(r, ones) b = LessOrEqual(r, c) m = Where(b,
    s, low) $WEIGHTS }

attention to what comes after: N SPLIT, T EXACT
    $SCORES <float low={-1e30}, int64 zero={0}, int64 one={1}, int64[1] ones={1}> { $PRODUCT t = Shape<start=1,
    end=2>(q) e = Squeeze(t) r = Range(zero, e, one) c = Unsqueeze(r, ones) b = GreaterOrEqual(r, c) m =
    Where(b, s, low) $WEIGHTS }

attention without weights that are not numbers: N SPLIT, T PADDED
    $SCORES $LOW, int64[1] ones={1}, float o={0.0}> { $PRODUCT $BIAS a = Softmax<axis=-1>(m) i = IsNaN(a) w =
    Where(i, o, a) y = MatMul(w, v) }

the first of a sequence: N SPLIT, T PADDED
    g (float[N,T,4] x) => (float[N,4] z, float[N,T,4] y) <int64 i={0}, int64[1] ones={1}> { z =
    Gather<axis=1>(x, i) u = Unsqueeze(z, ones) y = Add(x, u) }

the second of a sequence: N SPLIT, T EXACT
    g (float[N,T,4] x) => (float[N,T,4] y) <int64[1] i={1}> { z = Gather<axis=1>(x, i) y = Add(x, z) }

the last of a sequence: N SPLIT, T EXACT
    g (float[N,T,4] x) => (float[N,T,4] y) <int64[1] i={-1}> { z = Gather<axis=1>(x, i) y = Add(x, z) }

Einsum of a mask: N SPLIT, T PADDED
    g (float[N,T,4] x, float[N,T] mask) => (float[N,4] y) { y = Einsum<equation="ntc,nt->nc">(x, mask) }

Einsum: N SPLIT, T EXACT
    g (float[N,T,4] x, float[N,T] z) => (float[N,4] y) { y = Einsum<equation="ntc,nt->nc">(x, z) }

Conv: N SPLIT, T EXACT
    $LINES $KERNEL> { y = Conv<pads=[1,1]>(x, w) }

Conv of what came before: N SPLIT, T PADDED
    $LINES $KERNEL> { c = Conv<pads=[2,0]>(x, w) y = Relu(c) }

Conv after Pad: N SPLIT, T PADDED
    $LINES $KERNEL, int64[6] p={0,0,2,0,0,0}> { q = Pad(x, p) c = Conv(q, w) y = Add(c, x) }

Conv, and its end cut off: N SPLIT, T PADDED
    $LINES $KERNEL, int64[1] a={0}, int64[1] b={-2}, int64[1] two={2}> { c = Conv<pads=[2,2]>(x, w) y = Slice(c,
    a, b, two) }

Conv, and its start cut off: N SPLIT, T EXACT
    $LINES $KERNEL, int64[1] a={2}, int64[1] b={99}, int64[1] two={2}> { c = Conv<pads=[2,2]>(x, w) y = Slice(c,
    a, b, two) }

Conv of zeros: N SPLIT, T PADDED
    g (float[N,4,T] x, float[N,1,T] mask) => (float[N,4,T] y) $KERNEL> { m = Mul(x, mask) y =
    Conv<pads=[1,1]>(m, w) }

a mask after a Conv: N SPLIT, T EXACT
    g (float[N,4,T] x, float[N,1,T] mask) => (float[N,4,1] y) $KERNEL, int64[1] two={2}> { c = Conv<pads=[1,1]>(x, w)
    m = Mul(c, mask) y = ReduceSum(m, two) }

Resize: N SPLIT, T EXACT
    $LINES <float[3] s={1.0,1.0,1.1}> { r = Resize<mode="linear">(x, , s) y = Add(r, x) }

Resize of another axis: N SPLIT, T SPLIT
    g (float[N,1,T,3] x) => (float[N,1,T,6] y) <float[4] s={1.0,1.0,1.0,2.0}> { y = Resize<mode="nearest">(x, , s) }

pooling: N SPLIT
    g (float[N,4,6] x) => (float[N,4,1] y) { p = MaxPool<kernel_shape=[2]>(x) y = GlobalAveragePool(p) }

pooling over time: N SPLIT, T EXACT
    g (float[N,4,T] x) => (float[N,4,T] y) { p = GlobalAveragePool(x) y = Add(x, p) }

batch norm: N SPLIT, T SPLIT
    g (float[N,4,T] x) => (float[N,4,T] y) $FOUR> { y = BatchNormalization(x, s, b, m, v) }

layer norm: N SPLIT, T SPLIT
    $SEQUENCE $FOUR> { y = LayerNormalization<axis=-1>(x, s, b) }

layer norm of a sequence: N SPLIT, T EXACT
    g (float[N,4,T] x, float[1] a) => (float[N,4,T] y) { y = LayerNormalization<axis=2>(x, a) }

instance norm: N SPLIT, T EXACT
    g (float[N,4,T] x) => (float[N,4,T] y) $FOUR> { y = InstanceNormalization(x, s, b) }

group norm: N SPLIT
    g (float[N,4,6] x) => (float[N,4,6] y) $FOUR> { y = GroupNormalization<num_groups=2>(x, s, b) }

a linear layer of all tokens: N SPLIT, T SPLIT
    $SEQUENCE <float[4,4] w={1,2,1,2,1,2,1,2,1,2,1,2,1,2,1,2}, int64[2] f={-1,4}> { r = Reshape(x, f) p =
    MatMul(r, w) s = Shape(x) y = Reshape(p, s) }

Softmax over tokens of all rows: N EXACT, T EXACT
    $SEQUENCE <int64[2] f={-1,4}> { r = Reshape(x, f) p = Softmax<axis=0>(r) s = Shape(x) y = Reshape(p, s) }

rows across the batch: N EXACT
    $ROWS <int64[2] f={2,-1}> { r = Reshape(x, f) p = Softmax<axis=1>(r) s = Shape(x) y = Reshape(p, s) }

heads: N SPLIT, T SPLIT
    $SEQUENCE <int64[4] f={0,0,2,2}> { r = Reshape(x, f) t = Transpose<perm=[0,2,1,3]>(r) e = Exp(t) u =
    Transpose<perm=[0,2,1,3]>(e) s = Shape(x) y = Reshape(u, s) }

embedding: N SPLIT, T SPLIT
    g (int64[N,T] x) => (float[N,T,2] y) <float[3,2] w={1,2,3,4,5,6}> { y = Gather(w, x) }

one hot: N SPLIT, T SPLIT
    g (int64[N,T] x) => (float[N,T,4] y) <int64 d={4}, float[2] v={0,1}> { y = OneHot(x, d, v) }

indices of each row: N SPLIT, T SPLIT
    g (float[N,4] x, int64[N,T] i) => (float[N,T] y) { y = GatherElements<axis=1>(x, i) }

indices of other rows: N EXACT, T SPLIT
    g (float[N,4] x, int64[T,4] i) => (float[T,4] y) { y = GatherElements<axis=0>(x, i) }

the entry of each row that is the largest: N SPLIT
    g (float[N,4,3] x, float[N,4] s) => (float[N,3] y) $INTS> { h = Shape<end=1>(x) e = Squeeze(h) r = Range(zero, e,
    one) a = ArgMax<axis=1, keepdims=0>(s) c = Unsqueeze(r, ones) d = Unsqueeze(a, ones) i = Concat<axis=-1>(c, d)
    y = GatherND(x, i) }

all positions of a row, by constant indices: T SPLIT
    g (float[2,T] x) => (float[T] y) $INTS> { s = Shape<start=1>(x) t = Squeeze(s) r = Range(zero, t, one) c =
    Unsqueeze(r, ones) z = Sub(c, c) i = Concat<axis=-1>(z, c) y = GatherND(x, i) }

all positions of a row in reverse: T EXACT
    g (float[2,T] x) => (float[T] y) $INTS> { s = Shape<start=1>(x) t = Squeeze(s) r = Range(zero, t, one) e =
    Sub(t, one) b = Sub(e, r) c = Unsqueeze(b, ones) z = Sub(c, c) i = Concat<axis=-1>(z, c) y = GatherND(x, i) }

entries of rows in another order: N EXACT
    g (float[N,4,3] x, int64[2,2] i) => (float[2,3] y) { y = GatherND(x, i) }

sums of bags: N SPLIT
    g (int64[N,2] x) => (float[N,3] y) $INTS, int64[1] two={2}, int64[1] f={-1}, int64[2] w={0,3}, float z={0.0},
    float[2,3] t={1,2,3,4,5,6}> { r = Reshape(x, f) e = Gather(t, r) s = Shape(x) n = Gather(s, zero) p = Range(zero, n,
    one) q = Unsqueeze(p, ones) b = Expand(q, s) g = Reshape(b, f) u = Unsqueeze(g, ones) h = Shape(e) i = Expand(u, h)
    m = Gather<axis=0>(s, zeros) l = Concat<axis=0>(m, three) c = Expand(z, l) y = ScatterElements<reduction="add">(c,
    i, e) }

a repeated number through a layer: N SPLIT
    g (float[N,4] x, float[1,4] a) => (float[N,4] y) $INTS, float[4,4] w={1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}> {
    s = Shape(x) e = Expand(a, s) p = MatMul(e, w) c, d = Split<axis=1, num_outputs=2>(p) q = Concat<axis=1>(d, c)
    y = Add(x, q) }

Split of features: N SPLIT, T SPLIT
    $SEQUENCE { a, b = Split<axis=2, num_outputs=2>(x) y = Concat<axis=2>(b, a) }

a constant in front: N SPLIT, T PADDED
    g (float[N,T] x) => (float[N,T] y) <float[1,1] c={7}, int64[1] a={0}, int64[1] b={-1}, int64[1] one={1},
    int64[2] e={4,1}> { r = Shape<end=1>(x) s = Concat<axis=0>(r, one) d = Expand(c, s) z = Concat<axis=1>(d, x)
    y = Slice(z, a, b, one) }

a constant behind: N SPLIT, T EXACT
    g (float[N,T] x) => (float[N,T] y) <float[1,1] c={7}, int64[1] a={1}, int64[1] b={99}, int64[1] one={1}> { r
    = Shape<end=1>(x) s = Concat<axis=0>(r, one) d = Expand(c, s) z = Concat<axis=1>(x, d) y = Slice(z, a, b,
    one) }

backward: N SPLIT, T EXACT
    g (float[N,T] x) => (float[N,T] y) <int64[1] a={-1}, int64[1] b={-99}, int64[1] one={1}, int64[1] s={-1}> {
    y = Slice(x, a, b, one, s) }

an operator of other domains: N SPLIT
    g (float[N,4] x) => (float[N,4] y) <float[4] b={1,2,3,4}> { g = com.microsoft.BiasGelu(x, b) y = Neg(g) }

a product of other domains: N PADDED
    g (float[N,4] x) => (float[N,N] y) { y = com.microsoft.FusedMatMul<transB=1>(x, x) }

a classifier: N SPLIT
    g (float[N,4] x) => (int64[N] y, float[N,2] p) { s = ai.onnx.ml.Scaler<offset=[1.0,0.0,2.0,1.0],
    scale=[1.0,2.0,1.0,1.0]>(x) y, p = ai.onnx.ml.LinearClassifier<classlabels_ints=[0,1],
    coefficients=[1.0,2.0,0.0,1.0,-1.0,0.0,1.0,2.0], intercepts=[0.5,0.0]>(s) }

a tree: N SPLIT
    $ROWS { t = ai.onnx.ml.TreeEnsembleRegressor<n_targets=1, nodes_treeids=[0,0,0], nodes_nodeids=[0,1,2],
    nodes_featureids=[1,0,0], nodes_values=[0.5,0.0,0.0], nodes_modes=["BRANCH_LEQ","LEAF","LEAF"],
    nodes_truenodeids=[1,0,0], nodes_falsenodeids=[2,0,0], target_treeids=[0,0], target_nodeids=[1,2],
    target_ids=[0,0], target_weights=[1.0,2.0]>(x) y = Add(x, t) }

features less those of all: N EXACT
    g (float[N,4] x) => (float[4,N] y) { t = Transpose(x) y = ai.onnx.ml.Normalizer<norm="L2">(t) }

an unknown operator: N EXACT
    g (float[N,4] x) => (float[N,4] y) <float[4] b={1,2,3,4}> { y = com.microsoft.Rope(x, b) }

sizes that depend on another input: N SPLIT
    g (float[N,4] x, float[1] a) => (float[N,4] y) { s = NonZero(a) c = Cast<to=1>(s) d =
    ReduceSum<keepdims=0>(c) y = Add(x, d) }

a quantised weight: N SPLIT
    $ROWS <int8[4,4] q={1,-2,1,-2,1,-2,1,-2,1,-2,1,-2,1,-2,1,-2}, float[4] s={1,2,3,4}> { w =
    DequantizeLinear<axis=1>(q, s) y = MatMul(x, w) }

activations quantised by their range: N EXACT
    g (float[N,4] x) => (float[N,4] y) { q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z) }

LSTM: N SPLIT, T PADDED
    g (float[T,N,4] x) => (float[T,1,N,2] y) $LSTM> { y = LSTM<hidden_size=2>(x, w, r) }

the last state of an LSTM: N SPLIT, T EXACT
    g (float[T,N,4] x) => (float[1,N,2] y) $LSTM> { , y = LSTM<hidden_size=2>(x, w, r) }

an LSTM backward: N SPLIT, T EXACT
    g (float[T,N,4] x) => (float[T,1,N,2] y) $LSTM> { y = LSTM<hidden_size=2, direction="reverse">(x, w, r) }

an LSTM of lengths, backward: N SPLIT, T PADDED
    g (float[T,N,4] x, int32[N] n) => (float[T,1,N,2] y, float[1,N,2] h, float[1,N,2] c) $LSTM> { y, h, c =
    LSTM<hidden_size=2, direction="reverse">(x, w, r, , n) }

an LSTM as long as a mask says: N SPLIT, T PADDED
    g (float[T,N,4] x, float[N,T] mask) => (float[1,N,2] y) $LSTM, int64[1] ones={1}> { s =
    ReduceSum<keepdims=0>(mask, ones) n = Cast<to=6>(s) , y = LSTM<hidden_size=2>(x, w, r, , n) }

the sum of an LSTM of lengths: N SPLIT, T PADDED
    g (float[T,N,4] x, int32[N] n) => (float[1,N,2] y) $LSTM, int64[1] a={0}> { o = LSTM<hidden_size=2>(x, w, r, , n)
    y = ReduceSum<keepdims=0>(o, a) }

an LSTM of constant lengths: T EXACT
    g (float[T,2,4] x) => (float[1,2,2] y) $LSTM, int32[2] n={6,1}> { , y = LSTM<hidden_size=2>(x, w, r, , n) }

an LSTM of lengths beyond the steps: N SPLIT, T EXACT
    g (float[T,N,4] x, float[1,N,4] e, int32[N] n) => (float[1,N,2] y) $LSTM> { z = Concat<axis=0>(x, e)
    , y = LSTM<hidden_size=2>(z, w, r, , n) }

a loop over each: N SPLIT
    $ROWS <int64 n={3}, bool go={1}> { y = Loop(n, go, x) <$BODY Relu(s) }> }

a loop that sums up: N EXACT
    $ROWS <int64 n={3}, bool go={1}> { y = Loop(n, go, x) <$BODY Softmax<axis=0>(s) }> }

a loop as long as they say: N EXACT
    g (float[N,4] x) => (float[N,4] y) <bool go={1}> { m = ReduceMax<keepdims=0>(x) n = Cast<to=7>(m) y =
    Loop(n, go, x) <$BODY Neg(s) }> }

a scan of each: N SPLIT, T EXACT
    g (float[T,N,4] x, float[N,4] z) => (float[N,4] e, float[T,N,4] y) { e, y = Scan<num_scan_inputs=1, body = b
    (float[N,4] s, float[N,4] i) => (float[N,4] t, float[N,4] o) { t = Add(s, i) o = Identity(t) }>(z, x) }
"""
"""Models after their names, and how their dimensions may be served."""


def _cases() -> Iterator[tuple[str, tuple[str, dict[str, Fit]]]]:
    for block in MODELS.strip().split("\n\n"):
        head, _, text = block.partition("\n")
        name, _, fits = head.rpartition(": ")
        expected = (fit.split() for fit in fits.split(", "))
        yield name, (Template(text).substitute(PARTS), {dimension: Fit[fit] for dimension, fit in expected})


CASES = dict(_cases())


def parsed(text: str) -> ModelProto:
    """Return a model with the named dimensions N and T."""
    header = '<ir_version: 9, opset_import: ["" : 21, "com.microsoft" : 1, "ai.onnx.ml" : 3]>'
    return onnx.parser.parse_model(f"{header} {text}")


def proved(text: str) -> Mapping[str, Proof]:
    """Return what the graph proves for `SIZES`."""
    model = parsed(text)

    def axes(values: Any) -> dict[str, list[str | None]]:
        return {v.name: [dim.dim_param or None for dim in v.type.tensor_type.shape.dim] for v in values}

    inputs, outputs = axes(model.graph.input), axes(model.graph.output)
    fixed = ModelProto()
    fixed.CopyFrom(model)
    for value in fixed.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = SIZES[dim.dim_param]
    names = {name for of in inputs.values() for name in of if name}
    return prove_onnx(fixed, inputs, outputs, {name: SIZES[name] for name in sorted(names)}, ["mask"])


@pytest.mark.parametrize("case", CASES)
def test_graph_proves_fit(case: str) -> None:
    text, expected = CASES[case]
    assert {name: proof.fit for name, proof in proved(text).items()} == expected


def drawn(model: ModelProto, sizes: Mapping[str, int], seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Draw random inputs, with masks that leave everything."""
    random = np.random.default_rng(seed)
    found = {}
    for value in model.graph.input:
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        array = random.standard_normal(shape) * scale if dtype.kind == "f" else random.integers(0, 2, shape)
        found[value.name] = np.ones(shape, dtype) if value.name == "mask" else np.asarray(array).astype(dtype)
    return found


def boxes(values: Any, name: str, start: int, stop: int) -> dict[str, tuple[slice, ...]]:
    """Return the elements from ``start`` to ``stop`` of each value along the dimension ``name``."""
    return {
        v.name: tuple(slice(start, stop) if d.dim_param == name else slice(None) for d in v.type.tensor_type.shape.dim)
        for v in values
    }


@pytest.mark.parametrize("case", [case for case, (text, _) in CASES.items() if "Rope" not in text])
def test_runs_confirm_proof(case: str) -> None:
    """A call within padding of any magnitude, and for a split within other rows, gives what one alone does."""
    text, expected = CASES[case]
    model = parsed(text)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    outputs = [value.name for value in model.graph.output]
    for name, fit in expected.items():
        for start, stop, scale in [(0, 2, 1), (0, 2, 100), (1, 3, 100)][
            : 3 if fit is SPLIT else 2 if fit is PADDED else 0
        ]:
            alone = drawn(model, SIZES | {name: stop - start}, 1, 0.3)
            within = drawn(model, SIZES, 2, scale)
            within["mask"] = np.zeros_like(within.get("mask", ()))
            for key, box in boxes(model.graph.input, name, start, stop).items():
                within[key][box] = alone[key]
            if "mask" not in alone:
                del within["mask"]
            found = dict(zip(outputs, session.run(None, within), strict=True))
            for key, array in zip(outputs, session.run(None, alone), strict=True):
                box = boxes(model.graph.output, name, start, stop)[key]
                np.testing.assert_allclose(found[key][box], array, rtol=1e-4, atol=1e-5)


def test_fault_names_operator_and_value() -> None:
    proof = proved(CASES["the maximum chooses, by Where"][0])["N"]
    assert proof.fault == "ReduceMax 'm' computes across N"


def test_function_is_proved_by_its_body() -> None:
    text = (
        '<ir_version: 9, opset_import: ["" : 21, "local" : 1]> g (float[4,3] x) => (float[4,3] y) { y = local.f(x) } '
        '<opset_import: ["" : 21], domain: "local"> f (a) => (b) { b = OP }'
    )
    for operator, expected in (("Relu(a)", SPLIT), ("Softmax<axis=0>(a)", EXACT)):
        model = onnx.parser.parse_model(text.replace("OP", operator))
        (proof,) = prove_onnx(model, {"x": ("N", None)}, {"y": ("N", None)}, {"N": 4}).values()
        assert proof.fit is expected


@pytest.mark.parametrize("opset", [9, 12, 13, 18])
def test_axes_are_read_at_every_opset(opset: int) -> None:
    """Of a softmax, which flattens before opset 13, a sum, whose axes are an operand from 13 on, and a slice."""
    node = helper.make_node
    arrays = {"axes": np.array([1]), "starts": np.array([0]), "ends": np.array([2])}
    given_axes = {"axes": [1]} if opset < 13 else {}
    nodes = [
        node("Softmax", ["x"], ["s"], axis=1),
        node("ReduceSum", ["s", *(["axes"] if opset >= 13 else [])], ["r"], **given_axes),
        node(
            "Slice",
            ["x", *(["starts", "ends", "axes"] if opset >= 10 else [])],
            ["c"],
            **({"starts": [0], "ends": [2], "axes": [1]} if opset < 10 else {}),
        ),
        node("Add", ["r", "c"], ["y"]),
    ]
    floats = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (4, size)) for n, size in (("x", 3), ("y", 2))]
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", floats[:1], floats[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    for name, axes, expected in (("N", ("N", None), SPLIT), ("C", (None, "C"), EXACT)):
        (proof,) = prove_onnx(model, {"x": axes}, {"y": axes}, {name: 4}).values()
        assert proof.fit is expected


def _attention(mask: Callable[[Tensor, Tensor], Tensor] | None, *, is_causal: bool = False) -> Callable[..., Tensor]:
    def attend(x: Tensor, mask_of: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 2)).transpose(1, 2)
        given = None if mask is None else mask(x, mask_of)
        y = functional.scaled_dot_product_attention(q, q, q, given, is_causal=is_causal)
        return y.transpose(1, 2).flatten(2)

    return attend


def _low(x: Tensor, mask: Tensor) -> Tensor:
    return (1 - mask)[:, None, None] * torch.finfo(x.dtype).min


def _bool(_: Tensor, mask: Tensor) -> Tensor:
    return mask[:, None, None] > 0


def _causal(x: Tensor, _: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


class _Last(nn.Module):
    """The last state of a recurrent network, or all of its outputs."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.lstm, self.is_last = nn.LSTM(4, 4, batch_first=True), is_last

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Add it to the input."""
        y, (h, _) = self.lstm(x)
        return x + (h[0][:, None] if self.is_last else y) + 0 * mask[..., None]


MODULES: dict[str, tuple[Any, tuple[Fit, Fit]]] = {
    "relu": (lambda x, mask: x.relu() * mask[..., None], (SPLIT, SPLIT)),
    "maximum chooses": (lambda x, _: torch.where(x.max() > 1, x / 255, x), (EXACT, EXACT)),
    "maximum of each row chooses": (lambda x, _: torch.where(x.amax(1, True) > 1, x / 255, x), (SPLIT, EXACT)),
    "mean": (lambda x, _: x - x.mean(0), (EXACT, SPLIT)),
    "mean under a mask": (
        lambda x, mask: x + ((x * mask[..., None]).sum(1) / mask.sum(1, True))[:, None],
        (SPLIT, PADDED),
    ),
    "maximum under a mask": (
        lambda x, mask: x + x.masked_fill(mask[..., None] == 0, -torch.inf).amax(1, keepdim=True),
        (SPLIT, PADDED),
    ),
    "softmax over the batch": (lambda x, _: x.softmax(0), (EXACT, SPLIT)),
    "cumsum": (lambda x, _: x.cumsum(1), (SPLIT, PADDED)),
    "flip": (lambda x, _: x.flip(1), (SPLIT, EXACT)),
    "sort": (lambda x, _: x.sort(1).values + x.topk(4, 2).values, (SPLIT, EXACT)),
    "argmax": (lambda x, _: x + x.argmax(0), (EXACT, SPLIT)),
    "places": (lambda x, _: x + torch.arange(x.shape[1])[:, None], (SPLIT, PADDED)),
    "zeros": (lambda x, _: x + torch.zeros_like(x) + torch.ones(x.shape[1], 1), (SPLIT, SPLIT)),
    "first": (lambda x, _: x + x[:, :1], (SPLIT, PADDED)),
    "last": (lambda x, _: x + x[:, -1:], (SPLIT, EXACT)),
    "other rows": (lambda x, _: x[[1, 0, 2, 3]] + x, (EXACT, SPLIT)),
    "shifted": (lambda x, _: x + functional.pad(x, (0, 0, 1, 0))[:, :-1], (SPLIT, PADDED)),
    "shifted back": (lambda x, _: x + functional.pad(x, (0, 0, 0, 1))[:, 1:], (SPLIT, EXACT)),
    "stacked": (lambda x, _: torch.stack([x, -x], 2).flatten(1, 2).unflatten(1, (-1, 2)).sum(2), (SPLIT, SPLIT)),
    "attention": (_attention(None), (SPLIT, EXACT)),
    "attention under an additive mask": (_attention(_low), (SPLIT, PADDED)),
    "attention under a mask": (_attention(_bool), (SPLIT, PADDED)),
    "causal attention": (_attention(None, is_causal=True), (SPLIT, PADDED)),
    "attention under a causal mask": (_attention(_causal), (SPLIT, PADDED)),
    "linear": (nn.Linear(4, 4), (SPLIT, SPLIT)),
    "layer norm": (nn.LayerNorm(4), (SPLIT, SPLIT)),
    "batch norm": (nn.Sequential(nn.Unflatten(2, (4, 1)), nn.Flatten(2), nn.LayerNorm(4)), (SPLIT, SPLIT)),
    "outputs of an LSTM": (_Last(is_last=False), (SPLIT, PADDED)),
    "last state of an LSTM": (_Last(is_last=True), (SPLIT, EXACT)),
    "convolution": (lambda x, _: functional.conv1d(x.mT, torch.ones(4, 4, 3), padding=1).mT, (SPLIT, EXACT)),
    "convolution of what came before": (
        lambda x, _: functional.conv1d(functional.pad(x.mT, (2, 0)), torch.ones(4, 4, 3)).mT,
        (SPLIT, PADDED),
    ),
    "convolution of zeros": (
        lambda x, mask: functional.conv1d((x * mask[..., None]).mT, torch.ones(4, 4, 3), padding=1).mT,
        (SPLIT, PADDED),
    ),
    "largest of each row": (
        lambda x, _: x + x[torch.arange(4), x[:, :, 0].argmax(1)][:, None],
        (SPLIT, EXACT),
    ),
    "a mask read by constant indices": (
        lambda x, mask: x + mask[torch.arange(4)[:, None], torch.arange(6)].bool()[..., None],
        (SPLIT, SPLIT),
    ),
    "pooling": (lambda x, _: functional.max_pool1d(x.mT, 3, 1, 1).mT, (SPLIT, EXACT)),
    "embedding": (lambda x, _: functional.embedding((x > 0).long(), torch.ones(2, 4)).sum(2), (SPLIT, SPLIT)),
}


class _Module(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Call a function, or a module of one argument."""
        is_whole = isinstance(self.call, nn.Module) and not isinstance(self.call, _Last)
        return self.call(x) if is_whole else self.call(x, mask)


@pytest.mark.parametrize("case", MODULES)
def test_aten_graph_proves_fit(case: str) -> None:
    call, expected = MODULES[case]
    program = trace(_Module(call).eval(), (torch.ones(4, 6, 4), torch.ones(4, 6)))
    axes: Sequence[str | None] = ("N", "T", None)
    proofs = prove_aten(program.module, [(axes, False), (axes[:2], True)], [axes], SIZES)
    assert tuple(proof.fit for proof in proofs.values()) == expected
