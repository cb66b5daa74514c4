"""Written by schema/onnx_operators.py: the operators that a CPU plan may call.

For each "domain:name" a line for each of its versions, ascending:
since / least inputs / inputs / least outputs / outputs / attributes.
An input or output is an option, "1" must be there, "?" may be left out, "*" any number, and the types
that it may have: bit n of the hexadecimal number is ONNX's element type n. An attribute is name=type, the
number of AttributeProto.AttributeType, with a "!" where it must be there.
"""

OPSETS = {'': 28, 'ai.onnx.ml': 5, 'com.microsoft': 1, 'com.microsoft.nchwc': 1}

OPERATORS = {
    ":Abs": """\
1/1/1c02/1/1c02/consumed_inputs=7
6/1/13cfe/1/13cfe/
13/1/113cfe/1/113cfe/""",
    ":Acos": """\
7/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Acosh": """\
9/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Add": """\
1/2/1c02 1c02/1/1c02/axis=2 broadcast=2 consumed_inputs=7
6/2/13cc2 13cc2/1/13cc2/axis=2 broadcast=2
7/2/13cc2 13cc2/1/13cc2/
13/2/113cc2 113cc2/1/113cc2/
14/2/113cfe 113cfe/1/113cfe/""",
    ":Affine": """\
1/1/1c02/1/1c02/alpha=1 beta=1""",
    ":AffineGrid": """\
20/2/110c02 180/1/110c02/align_corners=2""",
    ":And": """\
1/2/1200 1200/1/1200/axis=2 broadcast=2
7/2/1200 1200/1/1200/""",
    ":ArgMax": """\
1/1/13cfe/1/180/axis=2 keepdims=2
11/1/13cfe/1/180/axis=2 keepdims=2
12/1/13cfe/1/180/axis=2 keepdims=2 select_last_index=2
13/1/113cfe/1/180/axis=2 keepdims=2 select_last_index=2""",
    ":ArgMin": """\
1/1/13cfe/1/180/axis=2 keepdims=2
11/1/13cfe/1/180/axis=2 keepdims=2
12/1/13cfe/1/180/axis=2 keepdims=2 select_last_index=2
13/1/113cfe/1/180/axis=2 keepdims=2 select_last_index=2""",
    ":Asin": """\
7/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Asinh": """\
9/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Atan": """\
7/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Atanh": """\
9/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Attention": """\
23/3/110c02 110c02 110c02 ?13efe ?10c02 ?10c02/1/110c02 ?10c02 ?10c02 ?10c02/is_causal=2 kv_num_heads=2 q_num_heads=2 qk_matmul_output_mode=2 scale=1 softcap=1 softmax_precision=2
24/3/110c02 110c02 110c02 ?13efe ?10c02 ?10c02 ?80/1/110c02 ?10c02 ?10c02 ?10c02/is_causal=2 kv_num_heads=2 q_num_heads=2 qk_matmul_output_mode=2 scale=1 softcap=1 softmax_precision=2
25/3/110c02 110c02 110c02 ?13efe ?10c02 ?10c02 ?80/1/110c02 ?10c02 ?10c02 ?10c02/is_causal=2 kv_num_heads=2 left_window_size=2 q_num_heads=2 qk_matmul_output_mode=2 right_window_size=2 scale=1 softcap=1 softmax_precision=2""",
    ":AveragePool": """\
1/1/1c02/1/1c02/auto_pad=3 kernel_shape=7! pads=7 strides=7
7/1/1c02/1/1c02/auto_pad=3 count_include_pad=2 kernel_shape=7! pads=7 strides=7
10/1/1c02/1/1c02/auto_pad=3 ceil_mode=2 count_include_pad=2 kernel_shape=7! pads=7 strides=7
11/1/1c02/1/1c02/auto_pad=3 ceil_mode=2 count_include_pad=2 kernel_shape=7! pads=7 strides=7
19/1/1c02/1/1c02/auto_pad=3 ceil_mode=2 count_include_pad=2 dilations=7 kernel_shape=7! pads=7 strides=7
22/1/110c02/1/110c02/auto_pad=3 ceil_mode=2 count_include_pad=2 dilations=7 kernel_shape=7! pads=7 strides=7""",
    ":BatchNormalization": """\
1/5/1c02 1c02 1c02 1c02 1c02/1/1c02 ?c02 ?c02 ?c02 ?c02/consumed_inputs=7! epsilon=1 is_test=2 momentum=1 spatial=2
6/5/1c02 1c02 1c02 1c02 1c02/1/1c02 ?c02 ?c02 ?c02 ?c02/epsilon=1 is_test=2 momentum=1 spatial=2
7/5/1c02 1c02 1c02 1c02 1c02/1/1c02 ?c02 ?c02 ?c02 ?c02/epsilon=1 momentum=1 spatial=2
9/5/1c02 1c02 1c02 1c02 1c02/1/1c02 ?c02 ?c02 ?c02 ?c02/epsilon=1 momentum=1
14/5/110c02 110c02 110c02 110c02 110c02/1/110c02 ?10c02 ?10c02/epsilon=1 momentum=1 training_mode=2
15/5/110c02 110c02 110c02 110c02 110c02/1/110c02 ?10c02 ?10c02/epsilon=1 momentum=1 training_mode=2""",
    ":BitCast": """\
26/1/17fffefe/1/17fffefe/to=2!""",
    ":BitShift": """\
11/2/13014 13014/1/13014/direction=3!
28/2/130fc 130fc/1/130fc/direction=3!""",
    ":BitwiseAnd": """\
18/2/130fc 130fc/1/130fc/""",
    ":BitwiseNot": """\
18/1/130fc/1/130fc/""",
    ":BitwiseOr": """\
18/2/130fc 130fc/1/130fc/""",
    ":BitwiseXor": """\
18/2/130fc 130fc/1/130fc/""",
    ":BlackmanWindow": """\
17/1/1c0/1/113cfe/output_datatype=2 periodic=2""",
    ":Cast": """\
1/1/13efe/1/13efe/to=3!
6/1/13efe/1/13efe/to=2!
9/1/13ffe/1/13ffe/to=2!
13/1/113ffe/1/113ffe/to=2!
19/1/11f3ffe/1/11f3ffe/saturate=2 to=2!
21/1/17f3ffe/1/17f3ffe/saturate=2 to=2!
23/1/1ff3ffe/1/1ff3ffe/saturate=2 to=2!
24/1/11ff3ffe/1/11ff3ffe/round_mode=3 saturate=2 to=2!
25/1/17ff3ffe/1/17ff3ffe/round_mode=3 saturate=2 to=2!
28/1/11fff3ffe/1/11fff3ffe/round_mode=3 saturate=2 to=2!""",
    ":Ceil": """\
1/1/1c02/1/1c02/consumed_inputs=7
6/1/1c02/1/1c02/
13/1/110c02/1/110c02/""",
    ":Celu": """\
12/1/12/1/12/alpha=1
28/1/110c02/1/110c02/alpha=1""",
    ":Clip": """\
1/1/1c02/1/1c02/consumed_inputs=7 max=1 min=1
6/1/1c02/1/1c02/max=1 min=1
11/1/1c02 ?c02 ?c02/1/1c02/
12/1/13cfe ?3cfe ?3cfe/1/13cfe/
13/1/113cfe ?13cfe ?13cfe/1/113cfe/""",
    ":Col2Im": """\
18/3/11fffe 180 180/1/11fffe/dilations=7 pads=7 strides=7""",
    ":Compress": """\
9/2/1fffe 1200/1/1fffe/axis=2
11/2/1fffe 1200/1/1fffe/axis=2
28/2/11fffe 1200/1/11fffe/axis=2""",
    ":Concat": """\
1/1/*c02/1/1c02/axis=2
4/1/*fffe/1/1fffe/axis=2!
11/1/*fffe/1/1fffe/axis=2!
13/1/*1fffe/1/11fffe/axis=2!""",
    ":ConcatFromSequence": """\
11/1/10/1/1fffe/axis=2! new_axis=2""",
    ":ConstantOfShape": """\
9/1/180/1/13efe/value=4
20/1/180/1/11f3efe/value=4
21/1/180/1/17f3efe/value=4
23/1/180/1/1ff3efe/value=4
24/1/180/1/11ff3efe/value=4
25/1/180/1/17ff3efe/value=4""",
    ":Conv": """\
1/2/1c02 1c02 ?c02/1/1c02/auto_pad=3 dilations=7 group=2 kernel_shape=7 pads=7 strides=7
11/2/1c02 1c02 ?c02/1/1c02/auto_pad=3 dilations=7 group=2 kernel_shape=7 pads=7 strides=7
22/2/110c02 110c02 ?10c02/1/110c02/auto_pad=3 dilations=7 group=2 kernel_shape=7 pads=7 strides=7""",
    ":ConvInteger": """\
10/2/1c 1c ?c ?c/1/140/auto_pad=3 dilations=7 group=2 kernel_shape=7 pads=7 strides=7""",
    ":ConvTranspose": """\
1/2/1c02 1c02 ?c02/1/1c02/auto_pad=3 dilations=7 group=2 kernel_shape=7 output_padding=7 output_shape=7 pads=7 strides=7
11/2/1c02 1c02 ?c02/1/1c02/auto_pad=3 dilations=7 group=2 kernel_shape=7 output_padding=7 output_shape=7 pads=7 strides=7
22/2/110c02 110c02 ?10c02/1/110c02/auto_pad=3 dilations=7 group=2 kernel_shape=7 output_padding=7 output_shape=7 pads=7 strides=7""",
    ":Cos": """\
7/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Cosh": """\
9/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Crop": """\
1/1/1c02/1/1c02/border=7 scale=7""",
    ":CumProd": """\
26/2/113cc2 1c0/1/113cc2/exclusive=2 reverse=2""",
    ":CumSum": """\
11/2/138c2 1c0/1/138c2/exclusive=2 reverse=2
14/2/113cc2 1c0/1/113cc2/exclusive=2 reverse=2""",
    ":DFT": """\
17/1/110c02 ?c0/1/110c02/axis=2 inverse=2 onesided=2
20/1/110c02 ?c0 ?80/1/110c02/inverse=2 onesided=2""",
    ":DeformConv": """\
19/3/1c02 1c02 1c02 ?c02 ?c02/1/1c02/dilations=7 group=2 kernel_shape=7 offset_group=2 pads=7 strides=7
22/3/110c02 110c02 110c02 ?10c02 ?10c02/1/110c02/dilations=7 group=2 kernel_shape=7 offset_group=2 pads=7 strides=7""",
    ":DepthToSpace": """\
1/1/1fffe/1/1fffe/blocksize=2!
11/1/1fffe/1/1fffe/blocksize=2! mode=3
13/1/11fffe/1/11fffe/blocksize=2! mode=3
28/1/11fffe/1/11fffe/blocksize=2! mode=3""",
    ":DequantizeLinear": """\
10/2/14c 12 ?4c/1/12/
13/2/14c 12 ?4c/1/12/axis=2
19/2/11e004c 110402 ?1e004c/1/110402/axis=2
21/2/17e007c 110402 ?7e007c/1/110402/axis=2 block_size=2
23/2/1fe007c 110402 ?fe007c/1/110402/axis=2 block_size=2 output_dtype=2
24/2/1fe007c 11010402 ?fe007c/1/110402/axis=2 block_size=2 output_dtype=2
25/2/16fe007c 11010402 ?6fe007c/1/110402/axis=2 block_size=2 output_dtype=2
28/2/11efe007c 11010402 ?1efe007c/1/110402/axis=2 block_size=2 output_dtype=2""",
    ":Det": """\
11/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Div": """\
1/2/1c02 1c02/1/1c02/axis=2 broadcast=2 consumed_inputs=7
6/2/13cc2 13cc2/1/13cc2/axis=2 broadcast=2
7/2/13cc2 13cc2/1/13cc2/
13/2/113cc2 113cc2/1/113cc2/
14/2/113cfe 113cfe/1/113cfe/""",
    ":Dropout": """\
1/1/1c02/1/1c02 ?c02/consumed_inputs=7 is_test=2 ratio=1
6/1/1c02/1/1c02 ?c02/is_test=2 ratio=1
7/1/1c02/1/1c02 ?c02/ratio=1
10/1/1c02/1/1c02 ?200/ratio=1
12/1/1c02 ?c02 ?200/1/1c02 ?200/seed=2
13/1/110c02 ?c02 ?200/1/110c02 ?200/seed=2
22/1/11f0c02 ?1f0c02 ?200/1/11f0c02 ?200/seed=2""",
    ":DynamicQuantizeLinear": """\
11/1/12/3/14 12 14/""",
    ":DynamicSlice": """\
1/3/1fffe 1c0 1c0 ?c0/1/1fffe/""",
    ":Einsum": """\
12/1/*3cfe/1/13cfe/equation=3!
28/1/*13cfe/1/113cfe/equation=3!""",
    ":Elu": """\
1/1/1c02/1/1c02/alpha=1 consumed_inputs=7
6/1/1c02/1/1c02/alpha=1
22/1/110c02/1/110c02/alpha=1""",
    ":Equal": """\
1/2/12c0 12c0/1/1200/axis=2 broadcast=2
7/2/12c0 12c0/1/1200/
11/2/13efe 13efe/1/1200/
13/2/113efe 113efe/1/1200/
19/2/113ffe 113ffe/1/1200/""",
    ":Erf": """\
9/1/13cfe/1/13cfe/
13/1/110c02/1/110c02/""",
    ":Exp": """\
1/1/1c02/1/1c02/consumed_inputs=7
6/1/1c02/1/1c02/
13/1/110c02/1/110c02/""",
    ":Expand": """\
8/2/1fffe 180/1/1fffe/
13/2/11fffe 180/1/11fffe/""",
    ":EyeLike": """\
9/1/13efe/1/13efe/dtype=2 k=2
22/1/113efe/1/113efe/dtype=2 k=2""",
    ":Flatten": """\
1/1/1c02/1/1c02/axis=2
9/1/1fffe/1/1fffe/axis=2
11/1/1fffe/1/1fffe/axis=2
13/1/11fffe/1/11fffe/axis=2
21/1/17ffffe/1/17ffffe/axis=2
23/1/1fffffe/1/1fffffe/axis=2
24/1/11fffffe/1/11fffffe/axis=2
25/1/17fffffe/1/17fffffe/axis=2""",
    ":Floor": """\
1/1/1c02/1/1c02/consumed_inputs=7
6/1/1c02/1/1c02/
13/1/110c02/1/110c02/""",
    ":GRU": """\
1/3/1c02 1c02 1c02 ?c02 ?40 ?c02/2/?c02 1c02/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2 output_sequence=2
3/3/1c02 1c02 1c02 ?c02 ?40 ?c02/0/?c02 ?c02/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2 linear_before_reset=2 output_sequence=2
7/3/1c02 1c02 1c02 ?c02 ?40 ?c02/0/?c02 ?c02/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2 linear_before_reset=2
14/3/1c02 1c02 1c02 ?c02 ?40 ?c02/0/?c02 ?c02/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2 layout=2 linear_before_reset=2
22/3/110c02 110c02 110c02 ?10c02 ?40 ?10c02/0/?10c02 ?10c02/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2 layout=2 linear_before_reset=2""",
    ":Gather": """\
1/2/1fffe 1c0/1/1fffe/axis=2
11/2/1fffe 1c0/1/1fffe/axis=2
13/2/11fffe 1c0/1/11fffe/axis=2""",
    ":GatherElements": """\
11/2/1fffe 1c0/1/1fffe/axis=2
13/2/11fffe 1c0/1/11fffe/axis=2""",
    ":GatherND": """\
11/2/1fffe 180/1/1fffe/
12/2/1fffe 180/1/1fffe/batch_dims=2
13/2/11fffe 180/1/11fffe/batch_dims=2""",
    ":Gelu": """\
20/1/110c02/1/110c02/approximate=3""",
    ":Gemm": """\
1/3/1c02 1c02 1c02/1/1c02/alpha=1 beta=1 broadcast=2 transA=2 transB=2
6/3/1c02 1c02 1c02/1/1c02/alpha=1 beta=1 broadcast=2 transA=2 transB=2
7/3/1c02 1c02 1c02/1/1c02/alpha=1 beta=1 transA=2 transB=2
9/3/13cc2 13cc2 13cc2/1/13cc2/alpha=1 beta=1 transA=2 transB=2
11/2/13cc2 13cc2 ?3cc2/1/13cc2/alpha=1 beta=1 transA=2 transB=2
13/2/113cc2 113cc2 ?13cc2/1/113cc2/alpha=1 beta=1 transA=2 transB=2""",
    ":GlobalAveragePool": """\
1/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":GlobalLpPool": """\
1/1/1c02/1/1c02/p=1
2/1/1c02/1/1c02/p=2
22/1/110c02/1/110c02/p=2""",
    ":GlobalMaxPool": """\
1/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Greater": """\
1/2/1c02 1c02/1/1200/axis=2 broadcast=2
7/2/1c02 1c02/1/1200/
9/2/13cfe 13cfe/1/1200/
13/2/113cfe 113cfe/1/1200/""",
    ":GreaterOrEqual": """\
12/2/13cfe 13cfe/1/1200/
16/2/113cfe 113cfe/1/1200/""",
    ":GridSample": """\
16/2/1fffe 1c02/1/1fffe/align_corners=2 mode=3 padding_mode=3
20/2/1fffe 1c02/1/1fffe/align_corners=2 mode=3 padding_mode=3
22/2/11fffe 110c02/1/11fffe/align_corners=2 mode=3 padding_mode=3""",
    ":HammingWindow": """\
17/1/1c0/1/113cfe/output_datatype=2 periodic=2""",
    ":HannWindow": """\
17/1/1c0/1/113cfe/output_datatype=2 periodic=2""",
    ":HardSigmoid": """\
1/1/1c02/1/1c02/alpha=1 beta=1 consumed_inputs=7
6/1/1c02/1/1c02/alpha=1 beta=1
22/1/110c02/1/110c02/alpha=1 beta=1""",
    ":Hardmax": """\
1/1/1c02/1/1c02/axis=2
11/1/1c02/1/1c02/axis=2
13/1/110c02/1/110c02/axis=2""",
    ":Identity": """\
1/1/1fffe/1/1fffe/
13/1/11fffe/1/11fffe/
14/1/11fffe/1/11fffe/
16/1/11fffe/1/11fffe/
19/1/11ffffe/1/11ffffe/
21/1/17ffffe/1/17ffffe/
23/1/1fffffe/1/1fffffe/
24/1/11fffffe/1/11fffffe/
25/1/17fffffe/1/17fffffe/""",
    ":If": """\
1/1/1200/1/*fffe/else_branch=5! then_branch=5!
11/1/1200/1/*fffe/else_branch=5! then_branch=5!
13/1/1200/1/*fffe/else_branch=5! then_branch=5!
16/1/1200/1/*1fffe/else_branch=5! then_branch=5!
19/1/1200/1/*1ffffe/else_branch=5! then_branch=5!
21/1/1200/1/*7ffffe/else_branch=5! then_branch=5!
23/1/1200/1/*fffffe/else_branch=5! then_branch=5!
24/1/1200/1/*1fffffe/else_branch=5! then_branch=5!
25/1/1200/1/*7fffffe/else_branch=5! then_branch=5!""",
    ":ImageScaler": """\
1/1/1c02/1/1c02/bias=6 scale=1""",
    ":InstanceNormalization": """\
1/3/1c02 1c02 1c02/1/1c02/consumed_inputs=7 epsilon=1
6/3/1c02 1c02 1c02/1/1c02/epsilon=1
22/3/110c02 110c02 110c02/1/110c02/epsilon=1""",
    ":IsInf": """\
10/1/1802/1/1200/detect_negative=2 detect_positive=2
20/1/11f0c02/1/1200/detect_negative=2 detect_positive=2""",
    ":IsNaN": """\
9/1/1c02/1/1200/
13/1/110c02/1/1200/
20/1/11f0c02/1/1200/""",
    ":LRN": """\
1/1/1c02/1/1c02/alpha=1 beta=1 bias=1 size=2!
13/1/110c02/1/110c02/alpha=1 beta=1 bias=1 size=2!""",
    ":LSTM": """\
1/3/1c02 1c02 1c02 ?c02 ?40 ?c02 ?c02 ?c02/0/?c02 ?c02 ?c02/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2 input_forget=2 output_sequence=2
7/3/1c02 1c02 1c02 ?c02 ?40 ?c02 ?c02 ?c02/0/?c02 ?c02 ?c02/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2 input_forget=2
14/3/1c02 1c02 1c02 ?c02 ?40 ?c02 ?c02 ?c02/0/?c02 ?c02 ?c02/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2 input_forget=2 layout=2
22/3/110c02 110c02 110c02 ?10c02 ?40 ?10c02 ?10c02 ?10c02/0/?10c02 ?10c02 ?10c02/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2 input_forget=2 layout=2""",
    ":LayerNormalization": """\
1/2/110c02 110c02 ?10c02/1/110c02 ?802 ?802/axis=2 epsilon=1 stash_type=2
17/2/110c02 110c02 ?10c02/1/110c02 ?10002 ?10002/axis=2 epsilon=1 stash_type=2""",
    ":LeakyRelu": """\
1/1/1c02/1/1c02/alpha=1 consumed_inputs=7
6/1/1c02/1/1c02/alpha=1
16/1/110c02/1/110c02/alpha=1""",
    ":Less": """\
1/2/1c02 1c02/1/1200/axis=2 broadcast=2
7/2/1c02 1c02/1/1200/
9/2/13cfe 13cfe/1/1200/
13/2/113cfe 113cfe/1/1200/""",
    ":LessOrEqual": """\
12/2/13cfe 13cfe/1/1200/
16/2/113cfe 113cfe/1/1200/""",
    ":Log": """\
1/1/1c02/1/1c02/consumed_inputs=7
6/1/1c02/1/1c02/
13/1/110c02/1/110c02/""",
    ":LogSoftmax": """\
1/1/1c02/1/1c02/axis=2
11/1/1c02/1/1c02/axis=2
13/1/110c02/1/110c02/axis=2""",
    ":Loop": """\
1/3/?80 ?200 *fffe/1/*fffe/body=5!
11/2/?80 ?200 *fffe/1/*fffe/body=5!
13/2/?80 ?200 *fffe/1/*fffe/body=5!
16/2/?80 ?200 *1fffe/1/*1fffe/body=5!
19/2/?80 ?200 *1ffffe/1/*1ffffe/body=5!
21/2/?80 ?200 *7ffffe/1/*7ffffe/body=5!
23/2/?80 ?200 *fffffe/1/*fffffe/body=5!
24/2/?80 ?200 *1fffffe/1/*1fffffe/body=5!
25/2/?80 ?200 *7fffffe/1/*7fffffe/body=5!""",
    ":LpNormalization": """\
1/1/1c02/1/1c02/axis=2 p=2
22/1/110c02/1/110c02/axis=2 p=2""",
    ":LpPool": """\
1/1/1c02/1/1c02/auto_pad=3 kernel_shape=7 p=1 pads=7 strides=7
2/1/1c02/1/1c02/auto_pad=3 kernel_shape=7! p=2 pads=7 strides=7
11/1/1c02/1/1c02/auto_pad=3 kernel_shape=7! p=2 pads=7 strides=7
18/1/1c02/1/1c02/auto_pad=3 ceil_mode=2 dilations=7 kernel_shape=7! p=2 pads=7 strides=7
22/1/110c02/1/110c02/auto_pad=3 ceil_mode=2 dilations=7 kernel_shape=7! p=2 pads=7 strides=7""",
    ":MatMul": """\
1/2/1c02 1c02/1/1c02/
9/2/13cc2 13cc2/1/13cc2/
13/2/113cc2 113cc2/1/113cc2/""",
    ":MatMulInteger": """\
10/2/1c 1c ?c ?c/1/140/""",
    ":Max": """\
1/1/*c02/1/1c02/consumed_inputs=7
6/1/*c02/1/1c02/
8/1/*c02/1/1c02/
12/1/*3cfe/1/13cfe/
13/1/*13cfe/1/113cfe/""",
    ":MaxPool": """\
1/1/1c02/1/1c02/auto_pad=3 kernel_shape=7! pads=7 strides=7
8/1/1c02/1/1c02 ?80/auto_pad=3 kernel_shape=7! pads=7 storage_order=2 strides=7
10/1/1c02/1/1c02 ?80/auto_pad=3 ceil_mode=2 dilations=7 kernel_shape=7! pads=7 storage_order=2 strides=7
11/1/1c02/1/1c02 ?80/auto_pad=3 ceil_mode=2 dilations=7 kernel_shape=7! pads=7 storage_order=2 strides=7
12/1/1c0e/1/1c0e ?80/auto_pad=3 ceil_mode=2 dilations=7 kernel_shape=7! pads=7 storage_order=2 strides=7
22/1/110c0e/1/110c0e ?80/auto_pad=3 ceil_mode=2 dilations=7 kernel_shape=7! pads=7 storage_order=2 strides=7""",
    ":MaxUnpool": """\
9/2/1c02 180 ?80/1/1c02/kernel_shape=7! pads=7 strides=7
11/2/1c02 180 ?80/1/1c02/kernel_shape=7! pads=7 strides=7
22/2/110c02 180 ?80/1/110c02/kernel_shape=7! pads=7 strides=7""",
    ":Mean": """\
1/1/*c02/1/1c02/consumed_inputs=7
6/1/*c02/1/1c02/
8/1/*c02/1/1c02/
13/1/*10c02/1/110c02/""",
    ":MeanVarianceNormalization": """\
1/1/1c02/1/1c02/across_channels=2 normalize_variance=2
9/1/1c02/1/1c02/axes=7
13/1/110c02/1/110c02/axes=7""",
    ":MelWeightMatrix": """\
17/5/1c0 1c0 1c0 110c02 110c02/1/113cfe/output_datatype=2""",
    ":Min": """\
1/1/*c02/1/1c02/consumed_inputs=7
6/1/*c02/1/1c02/
8/1/*c02/1/1c02/
12/1/*3cfe/1/13cfe/
13/1/*13cfe/1/113cfe/""",
    ":Mod": """\
10/2/13cfe 13cfe/1/13cfe/fmod=2
13/2/113cfe 113cfe/1/113cfe/fmod=2
28/2/113cfe 113cfe/1/113cfe/fmod=2""",
    ":Mul": """\
1/2/1c02 1c02/1/1c02/axis=2 broadcast=2 consumed_inputs=7
6/2/13cc2 13cc2/1/13cc2/axis=2 broadcast=2
7/2/13cc2 13cc2/1/13cc2/
13/2/113cc2 113cc2/1/113cc2/
14/2/113cfe 113cfe/1/113cfe/""",
    ":Neg": """\
1/1/1c02/1/1c02/consumed_inputs=7
6/1/1cea/1/1cea/
13/1/110cea/1/110cea/""",
    ":NonMaxSuppression": """\
10/2/12 12 ?80 ?2 ?2/1/180/center_point_box=2
11/2/12 12 ?80 ?2 ?2/1/180/center_point_box=2""",
    ":NonZero": """\
9/1/1fffe/1/180/
13/1/11fffe/1/180/""",
    ":Not": """\
1/1/1200/1/1200/""",
    ":OneHot": """\
9/3/13cfe 13cfe 1fffe/1/1fffe/axis=2
11/3/13cfe 13cfe 1fffe/1/1fffe/axis=2
28/3/13cfe 13cfe 11fffe/1/11fffe/axis=2""",
    ":OptionalGetElement": """\
15/1/10/1/1fffe/
18/1/1fffe/1/1fffe/
28/1/11ffffffe/1/11ffffffe/""",
    ":OptionalHasElement": """\
15/1/10/1/1200/
18/0/?fffe/1/1200/
28/0/?1ffffffe/1/1200/""",
    ":Or": """\
1/2/1200 1200/1/1200/axis=2 broadcast=2
7/2/1200 1200/1/1200/""",
    ":PRelu": """\
1/2/1c02 1c02/1/1c02/consumed_inputs=7
6/2/1c02 1c02/1/1c02/
7/2/1c02 1c02/1/1c02/
9/2/13cc2 13cc2/1/13cc2/
16/2/113cc2 113cc2/1/113cc2/""",
    ":Pad": """\
1/1/1c02/1/1c02/mode=3 paddings=7! value=1
2/1/1c02/1/1c02/mode=3 pads=7! value=1
11/2/13cfe 180 ?3cfe/1/13cfe/mode=3
13/2/11fffe 180 ?1fffe/1/11fffe/mode=3
18/2/11fffe 180 ?1fffe ?c0/1/11fffe/mode=3
19/2/11fffe 180 ?1fffe ?c0/1/11fffe/mode=3
21/2/17ffffe 180 ?7ffffe ?c0/1/17ffffe/mode=3
23/2/1fffffe 180 ?fffffe ?c0/1/1fffffe/mode=3
24/2/11fffffe 180 ?1fffffe ?c0/1/11fffffe/mode=3
25/2/17fffffe 180 ?7fffffe ?c0/1/17fffffe/mode=3""",
    ":ParametricSoftplus": """\
1/1/1c02/1/1c02/alpha=1 beta=1""",
    ":Pow": """\
1/2/1c02 1c02/1/1c02/axis=2 broadcast=2
7/2/1c02 1c02/1/1c02/
12/2/1cc2 13cfe/1/1cc2/
13/2/110cc2 13cfe/1/110cc2/
15/2/110cc2 113cfe/1/110cc2/""",
    ":QLinearConv": """\
10/8/1c 12 1c 1c 12 1c 12 1c ?40/1/1c/auto_pad=3 dilations=7 group=2 kernel_shape=7 pads=7 strides=7""",
    ":QLinearMatMul": """\
10/8/1c 12 1c 1c 12 1c 12 1c/1/1c/
21/8/11e000c 110402 11e000c 11e000c 110402 11e000c 110402 11e000c/1/11e000c/""",
    ":QuantizeLinear": """\
10/2/142 12 ?c/1/1c/
13/2/142 12 ?c/1/1c/axis=2
19/2/110442 110442 ?1e000c/1/11e000c/axis=2 saturate=2
21/2/110442 110442 ?7e003c/1/17e003c/axis=2 block_size=2 output_dtype=2 saturate=2
23/2/110442 110442 ?fe003c/1/1fe003c/axis=2 block_size=2 output_dtype=2 precision=2 saturate=2
24/2/110442 11010442 ?fe003c/1/1fe003c/axis=2 block_size=2 output_dtype=2 precision=2 saturate=2
25/2/110442 11010442 ?6fe003c/1/16fe003c/axis=2 block_size=2 output_dtype=2 precision=2 saturate=2
28/2/110442 11010442 ?1efe003c/1/11efe003c/axis=2 block_size=2 output_dtype=2 precision=2 saturate=2""",
    ":RMSNormalization": """\
23/2/110c02 110c02/1/110c02/axis=2 epsilon=1 stash_type=2""",
    ":RNN": """\
1/3/1c02 1c02 1c02 ?c02 ?40 ?c02/0/?c02 ?c02/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2 output_sequence=2
7/3/1c02 1c02 1c02 ?c02 ?40 ?c02/0/?c02 ?c02/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2
14/3/1c02 1c02 1c02 ?c02 ?40 ?c02/0/?c02 ?c02/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2 layout=2
22/3/110c02 110c02 110c02 ?10c02 ?40 ?10c02/0/?10c02 ?10c02/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2 layout=2""",
    ":Range": """\
11/3/18e2 18e2 18e2/1/18e2/
27/3/110ce2 110ce2 110ce2/1/110ce2/stash_type=2""",
    ":Reciprocal": """\
1/1/1c02/1/1c02/consumed_inputs=7
6/1/1c02/1/1c02/
13/1/110c02/1/110c02/""",
    ":ReduceL1": """\
1/1/13cc2/1/13cc2/axes=7 keepdims=2
11/1/13cc2/1/13cc2/axes=7 keepdims=2
13/1/113cc2/1/113cc2/axes=7 keepdims=2
18/1/113cc2 ?80/1/113cc2/keepdims=2 noop_with_empty_axes=2""",
    ":ReduceL2": """\
1/1/13cc2/1/13cc2/axes=7 keepdims=2
11/1/13cc2/1/13cc2/axes=7 keepdims=2
13/1/113cc2/1/113cc2/axes=7 keepdims=2
18/1/113cc2 ?80/1/113cc2/keepdims=2 noop_with_empty_axes=2""",
    ":ReduceLogSum": """\
1/1/13cc2/1/13cc2/axes=7 keepdims=2
11/1/13cc2/1/13cc2/axes=7 keepdims=2
13/1/113cc2/1/113cc2/axes=7 keepdims=2
18/1/113cc2 ?80/1/113cc2/keepdims=2 noop_with_empty_axes=2
28/1/110c02 ?80/1/110c02/keepdims=2 noop_with_empty_axes=2""",
    ":ReduceLogSumExp": """\
1/1/13cc2/1/13cc2/axes=7 keepdims=2
11/1/13cc2/1/13cc2/axes=7 keepdims=2
13/1/113cc2/1/113cc2/axes=7 keepdims=2
18/1/113cc2 ?80/1/113cc2/keepdims=2 noop_with_empty_axes=2
28/1/110c02 ?80/1/110c02/keepdims=2 noop_with_empty_axes=2""",
    ":ReduceMax": """\
1/1/13cc2/1/13cc2/axes=7 keepdims=2
11/1/13cc2/1/13cc2/axes=7 keepdims=2
12/1/13cce/1/13cce/axes=7 keepdims=2
13/1/113cce/1/113cce/axes=7 keepdims=2
18/1/113cce ?80/1/113cce/keepdims=2 noop_with_empty_axes=2
20/1/113ece ?80/1/113ece/keepdims=2 noop_with_empty_axes=2""",
    ":ReduceMean": """\
1/1/13cc2/1/13cc2/axes=7 keepdims=2
11/1/13cc2/1/13cc2/axes=7 keepdims=2
13/1/113cc2/1/113cc2/axes=7 keepdims=2
18/1/113cc2 ?80/1/113cc2/keepdims=2 noop_with_empty_axes=2""",
    ":ReduceMin": """\
1/1/13cc2/1/13cc2/axes=7 keepdims=2
11/1/13cc2/1/13cc2/axes=7 keepdims=2
12/1/13cce/1/13cce/axes=7 keepdims=2
13/1/113cce/1/113cce/axes=7 keepdims=2
18/1/113cce ?80/1/113cce/keepdims=2 noop_with_empty_axes=2
20/1/113ece ?80/1/113ece/keepdims=2 noop_with_empty_axes=2""",
    ":ReduceProd": """\
1/1/13cc2/1/13cc2/axes=7 keepdims=2
11/1/13cc2/1/13cc2/axes=7 keepdims=2
13/1/113cc2/1/113cc2/axes=7 keepdims=2
18/1/113cc2 ?80/1/113cc2/keepdims=2 noop_with_empty_axes=2""",
    ":ReduceSum": """\
1/1/13cc2/1/13cc2/axes=7 keepdims=2
11/1/13cc2/1/13cc2/axes=7 keepdims=2
13/1/113cc2 ?80/1/113cc2/keepdims=2 noop_with_empty_axes=2""",
    ":ReduceSumSquare": """\
1/1/13cc2/1/13cc2/axes=7 keepdims=2
11/1/13cc2/1/13cc2/axes=7 keepdims=2
13/1/113cc2/1/113cc2/axes=7 keepdims=2
18/1/113cc2 ?80/1/113cc2/keepdims=2 noop_with_empty_axes=2""",
    ":Relu": """\
1/1/1c02/1/1c02/consumed_inputs=7
6/1/1c02/1/1c02/
13/1/110c02/1/110c02/
14/1/110cea/1/110cea/""",
    ":Reshape": """\
1/1/1c02/1/1c02/consumed_inputs=7 shape=7
5/2/1fffe 180/1/1fffe/
13/2/11fffe 180/1/11fffe/
14/2/11fffe 180/1/11fffe/allowzero=2
19/2/11ffffe 180/1/11ffffe/allowzero=2
21/2/17ffffe 180/1/17ffffe/allowzero=2
23/2/1fffffe 180/1/1fffffe/allowzero=2
24/2/11fffffe 180/1/11fffffe/allowzero=2
25/2/17fffffe 180/1/17fffffe/allowzero=2""",
    ":Resize": """\
10/2/1fffe 12/1/1fffe/mode=3
11/3/1fffe 1c02 12 ?80/1/1fffe/coordinate_transformation_mode=3 cubic_coeff_a=1 exclude_outside=2 extrapolation_value=1 mode=3 nearest_mode=3
13/1/11fffe ?c02 ?2 ?80/1/11fffe/coordinate_transformation_mode=3 cubic_coeff_a=1 exclude_outside=2 extrapolation_value=1 mode=3 nearest_mode=3
18/1/11fffe ?c02 ?2 ?80/1/11fffe/antialias=2 axes=7 coordinate_transformation_mode=3 cubic_coeff_a=1 exclude_outside=2 extrapolation_value=1 keep_aspect_ratio_policy=3 mode=3 nearest_mode=3
19/1/11fffe ?c02 ?2 ?80/1/11fffe/antialias=2 axes=7 coordinate_transformation_mode=3 cubic_coeff_a=1 exclude_outside=2 extrapolation_value=1 keep_aspect_ratio_policy=3 mode=3 nearest_mode=3""",
    ":ReverseSequence": """\
10/2/1fffe 180/1/1fffe/batch_axis=2 time_axis=2
28/2/11fffe 180/1/11fffe/batch_axis=2 time_axis=2""",
    ":RoiAlign": """\
10/3/1c02 1c02 180/1/1c02/mode=3 output_height=2 output_width=2 sampling_ratio=2 spatial_scale=1
16/3/1c02 1c02 180/1/1c02/coordinate_transformation_mode=3 mode=3 output_height=2 output_width=2 sampling_ratio=2 spatial_scale=1
22/3/110c02 110c02 180/1/110c02/coordinate_transformation_mode=3 mode=3 output_height=2 output_width=2 sampling_ratio=2 spatial_scale=1""",
    ":RotaryEmbedding": """\
23/3/110402 110402 110402 ?80/1/110402/interleaved=2 num_heads=2 rotary_embedding_dim=2""",
    ":Round": """\
11/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":STFT": """\
17/2/110c02 1c0 ?10c02 ?c0/1/110c02/onesided=2""",
    ":Scale": """\
1/1/1c02/1/1c02/scale=1""",
    ":ScaledTanh": """\
1/1/1c02/1/1c02/alpha=1 beta=1""",
    ":Scan": """\
9/1/*fffe/1/*fffe/body=5! num_scan_inputs=2! scan_input_axes=7 scan_input_directions=7 scan_output_axes=7 scan_output_directions=7
11/1/*fffe/1/*fffe/body=5! num_scan_inputs=2! scan_input_axes=7 scan_input_directions=7 scan_output_axes=7 scan_output_directions=7
16/1/*1fffe/1/*1fffe/body=5! num_scan_inputs=2! scan_input_axes=7 scan_input_directions=7 scan_output_axes=7 scan_output_directions=7
19/1/*1ffffe/1/*1ffffe/body=5! num_scan_inputs=2! scan_input_axes=7 scan_input_directions=7 scan_output_axes=7 scan_output_directions=7
21/1/*7ffffe/1/*7ffffe/body=5! num_scan_inputs=2! scan_input_axes=7 scan_input_directions=7 scan_output_axes=7 scan_output_directions=7
23/1/*fffffe/1/*fffffe/body=5! num_scan_inputs=2! scan_input_axes=7 scan_input_directions=7 scan_output_axes=7 scan_output_directions=7
24/1/*1fffffe/1/*1fffffe/body=5! num_scan_inputs=2! scan_input_axes=7 scan_input_directions=7 scan_output_axes=7 scan_output_directions=7
25/1/*7fffffe/1/*7fffffe/body=5! num_scan_inputs=2! scan_input_axes=7 scan_input_directions=7 scan_output_axes=7 scan_output_directions=7""",
    ":Scatter": """\
9/3/1fffe 1c0 1fffe/1/1fffe/axis=2""",
    ":ScatterElements": """\
11/3/1fffe 1c0 1fffe/1/1fffe/axis=2
13/3/11fffe 1c0 11fffe/1/11fffe/axis=2
16/3/11fffe 1c0 11fffe/1/11fffe/axis=2 reduction=3
18/3/11fffe 1c0 11fffe/1/11fffe/axis=2 reduction=3""",
    ":ScatterND": """\
11/3/1fffe 180 1fffe/1/1fffe/
13/3/11fffe 180 11fffe/1/11fffe/
16/3/11fffe 180 11fffe/1/11fffe/reduction=3
18/3/11fffe 180 11fffe/1/11fffe/reduction=3""",
    ":Selu": """\
1/1/1c02/1/1c02/alpha=1 consumed_inputs=7 gamma=1
6/1/1c02/1/1c02/alpha=1 gamma=1
22/1/110c02/1/110c02/alpha=1 gamma=1""",
    ":SequenceAt": """\
11/2/10 1c0/1/1fffe/""",
    ":SequenceConstruct": """\
11/1/*fffe/1/10/""",
    ":SequenceEmpty": """\
11/0//1/10/dtype=2""",
    ":SequenceErase": """\
11/1/10 ?c0/1/10/""",
    ":SequenceInsert": """\
11/2/10 1fffe ?c0/1/10/""",
    ":SequenceLength": """\
11/1/10/1/180/""",
    ":Shape": """\
1/1/1fffe/1/180/
13/1/11fffe/1/180/
15/1/11fffe/1/180/end=2 start=2
19/1/11ffffe/1/180/end=2 start=2
21/1/17ffffe/1/180/end=2 start=2
23/1/1fffffe/1/180/end=2 start=2
24/1/11fffffe/1/180/end=2 start=2
25/1/17fffffe/1/180/end=2 start=2""",
    ":Shrink": """\
9/1/13cfe/1/13cfe/bias=1 lambd=1""",
    ":Sigmoid": """\
1/1/1c02/1/1c02/consumed_inputs=7
6/1/1c02/1/1c02/
13/1/110c02/1/110c02/""",
    ":Sign": """\
9/1/13cfe/1/13cfe/
13/1/113cfe/1/113cfe/""",
    ":SimplifiedLayerNormalization": """\
1/2/110c02 110c02/1/110c02 ?802/axis=2 epsilon=1 stash_type=2""",
    ":Sin": """\
7/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Sinh": """\
9/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Size": """\
1/1/1fffe/1/180/
13/1/11fffe/1/180/
19/1/11ffffe/1/180/
21/1/17ffffe/1/180/
23/1/1fffffe/1/180/
24/1/11fffffe/1/180/
25/1/17fffffe/1/180/""",
    ":Slice": """\
1/1/1fffe/1/1fffe/axes=7 ends=7! starts=7!
10/3/1fffe 1c0 1c0 ?c0 ?c0/1/1fffe/
11/3/1fffe 1c0 1c0 ?c0 ?c0/1/1fffe/
13/3/11fffe 1c0 1c0 ?c0 ?c0/1/11fffe/""",
    ":Softmax": """\
1/1/1c02/1/1c02/axis=2
11/1/1c02/1/1c02/axis=2
13/1/110c02/1/110c02/axis=2""",
    ":Softplus": """\
1/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Softsign": """\
1/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":SpaceToDepth": """\
1/1/1fffe/1/1fffe/blocksize=2!
13/1/11fffe/1/11fffe/blocksize=2!
28/1/11fffe/1/11fffe/blocksize=2! mode=3""",
    ":Split": """\
1/1/1c02 ?c02/1/*c02/axis=2 split=7
2/1/1fffe/1/*fffe/axis=2 split=7
11/1/1fffe/1/*fffe/axis=2 split=7
13/1/11fffe ?80/1/*1fffe/axis=2
18/1/11fffe ?80/1/*1fffe/axis=2 num_outputs=2""",
    ":Sqrt": """\
1/1/1c02/1/1c02/consumed_inputs=7
6/1/1c02/1/1c02/
13/1/110c02/1/110c02/""",
    ":Squeeze": """\
1/1/1fffe/1/1fffe/axes=7
11/1/1fffe/1/1fffe/axes=7
13/1/11fffe ?80/1/11fffe/
21/1/17ffffe ?80/1/17ffffe/
23/1/1fffffe ?80/1/1fffffe/
24/1/11fffffe ?80/1/11fffffe/
25/1/17fffffe ?80/1/17fffffe/""",
    ":Sub": """\
1/2/1c02 1c02/1/1c02/axis=2 broadcast=2 consumed_inputs=7
6/2/13cc2 13cc2/1/13cc2/axis=2 broadcast=2
7/2/13cc2 13cc2/1/13cc2/
13/2/113cc2 113cc2/1/113cc2/
14/2/113cfe 113cfe/1/113cfe/""",
    ":Sum": """\
1/1/*c02/1/1c02/consumed_inputs=7
6/1/*c02/1/1c02/
8/1/*c02/1/1c02/
13/1/*10c02/1/110c02/""",
    ":Tan": """\
7/1/1c02/1/1c02/
22/1/110c02/1/110c02/""",
    ":Tanh": """\
1/1/1c02/1/1c02/consumed_inputs=7
6/1/1c02/1/1c02/
13/1/110c02/1/110c02/""",
    ":TensorScatter": """\
24/2/11fffffe 11fffffe ?80/1/11fffffe/axis=2 mode=3""",
    ":TfIdfVectorizer": """\
9/1/11c0/1/12/max_gram_length=2! max_skip_count=2! min_gram_length=2! mode=3! ngram_counts=7! ngram_indexes=7! pool_int64s=7 pool_strings=8 weights=6""",
    ":ThresholdedRelu": """\
1/1/1c02/1/1c02/alpha=1
10/1/1c02/1/1c02/alpha=1
22/1/110c02/1/110c02/alpha=1""",
    ":Tile": """\
1/3/1c02 1c02 1c02/1/1c02/
6/2/1fffe 180/1/1fffe/
13/2/11fffe 180/1/11fffe/""",
    ":TopK": """\
1/1/1c02/2/1c02 180/axis=2 k=2!
10/2/1c02 180/2/1c02 180/axis=2
11/2/13cfe 180/2/13cfe 180/axis=2 largest=2 sorted=2
24/2/113cfe 180/2/113cfe 180/axis=2 largest=2 sorted=2""",
    ":Transpose": """\
1/1/1fffe/1/1fffe/perm=7
13/1/11fffe/1/11fffe/perm=7
21/1/17ffffe/1/17ffffe/perm=7
23/1/1fffffe/1/1fffffe/perm=7
24/1/11fffffe/1/11fffffe/perm=7
25/1/17fffffe/1/17fffffe/perm=7""",
    ":Trilu": """\
14/1/11fffe ?80/1/11fffe/upper=2""",
    ":Unique": """\
11/1/1fffe/1/1fffe ?80 ?80 ?80/axis=2 sorted=2
28/1/11fffe/1/11fffe ?80 ?80 ?80/axis=2 sorted=2""",
    ":Unsqueeze": """\
1/1/1fffe/1/1fffe/axes=7!
11/1/1fffe/1/1fffe/axes=7!
13/2/11fffe 180/1/11fffe/
21/2/17ffffe 180/1/17ffffe/
23/2/1fffffe 180/1/1fffffe/
24/2/11fffffe 180/1/11fffffe/
25/2/17fffffe 180/1/17fffffe/""",
    ":Upsample": """\
1/1/1ec2/1/1ec2/height_scale=1! mode=3 width_scale=1!
7/1/1fffe/1/1fffe/mode=3 scales=6!
9/2/1fffe 12/1/1fffe/mode=3""",
    ":Where": """\
9/3/1200 1fffe 1fffe/1/1fffe/
16/3/1200 11fffe 11fffe/1/11fffe/""",
    ":Xor": """\
1/2/1200 1200/1/1200/axis=2 broadcast=2
7/2/1200 1200/1/1200/""",
    "ai.onnx.ml:ArrayFeatureExtractor": """\
1/2/19c2 180/1/19c2/""",
    "ai.onnx.ml:Binarizer": """\
1/1/18c2/1/18c2/threshold=1""",
    "ai.onnx.ml:FeatureVectorizer": """\
1/1/*8c2/1/12/inputdimensions=7""",
    "ai.onnx.ml:Imputer": """\
1/1/18c2/1/18c2/imputed_value_floats=6 imputed_value_int64s=7 replaced_value_float=1 replaced_value_int64=2""",
    "ai.onnx.ml:LabelEncoder": """\
1/1/1180/1/1180/classes_strings=8 default_int64=2 default_string=3
2/1/1182/1/1182/default_float=1 default_int64=2 default_string=3 keys_floats=6 keys_int64s=7 keys_strings=8 values_floats=6 values_int64s=7 values_strings=8
4/1/19e2/1/19e2/default_float=1 default_int64=2 default_string=3 default_tensor=4 keys_floats=6 keys_int64s=7 keys_strings=8 keys_tensor=4 values_floats=6 values_int64s=7 values_strings=8 values_tensor=4""",
    "ai.onnx.ml:LinearClassifier": """\
1/1/18c2/2/1180 12/classlabels_ints=7 classlabels_strings=8 coefficients=6! intercepts=6 multi_class=2 post_transform=3""",
    "ai.onnx.ml:LinearRegressor": """\
1/1/18c2/1/12/coefficients=6 intercepts=6 post_transform=3 targets=2""",
    "ai.onnx.ml:Normalizer": """\
1/1/18c2/1/12/norm=3""",
    "ai.onnx.ml:OneHotEncoder": """\
1/1/19c2/1/12/cats_int64s=7 cats_strings=8 zeros=2""",
    "ai.onnx.ml:SVMClassifier": """\
1/1/18c2/2/1180 12/classlabels_ints=7 classlabels_strings=8 coefficients=6 kernel_params=6 kernel_type=3 post_transform=3 prob_a=6 prob_b=6 rho=6 support_vectors=6 vectors_per_class=7""",
    "ai.onnx.ml:SVMRegressor": """\
1/1/18c2/1/12/coefficients=6 kernel_params=6 kernel_type=3 n_supports=2 one_class=2 post_transform=3 rho=6 support_vectors=6""",
    "ai.onnx.ml:Scaler": """\
1/1/18c2/1/12/offset=6 scale=6""",
    "ai.onnx.ml:TreeEnsemble": """\
5/1/1c02/1/1c02/aggregate_function=2 leaf_targetids=7! leaf_weights=4! membership_values=4 n_targets=2 nodes_falseleafs=7! nodes_falsenodeids=7! nodes_featureids=7! nodes_hitrates=4 nodes_missing_value_tracks_true=7 nodes_modes=4! nodes_splits=4! nodes_trueleafs=7! nodes_truenodeids=7! post_transform=2 tree_roots=7!""",
    "ai.onnx.ml:TreeEnsembleClassifier": """\
1/1/18c2/2/1180 12/base_values=6 class_ids=7 class_nodeids=7 class_treeids=7 class_weights=6 classlabels_int64s=7 classlabels_strings=8 nodes_falsenodeids=7 nodes_featureids=7 nodes_hitrates=6 nodes_missing_value_tracks_true=7 nodes_modes=8 nodes_nodeids=7 nodes_treeids=7 nodes_truenodeids=7 nodes_values=6 post_transform=3
3/1/18c2/2/1180 12/base_values=6 base_values_as_tensor=4 class_ids=7 class_nodeids=7 class_treeids=7 class_weights=6 class_weights_as_tensor=4 classlabels_int64s=7 classlabels_strings=8 nodes_falsenodeids=7 nodes_featureids=7 nodes_hitrates=6 nodes_hitrates_as_tensor=4 nodes_missing_value_tracks_true=7 nodes_modes=8 nodes_nodeids=7 nodes_treeids=7 nodes_truenodeids=7 nodes_values=6 nodes_values_as_tensor=4 post_transform=3""",
    "ai.onnx.ml:TreeEnsembleRegressor": """\
1/1/18c2/1/12/aggregate_function=3 base_values=6 n_targets=2 nodes_falsenodeids=7 nodes_featureids=7 nodes_hitrates=6 nodes_missing_value_tracks_true=7 nodes_modes=8 nodes_nodeids=7 nodes_treeids=7 nodes_truenodeids=7 nodes_values=6 post_transform=3 target_ids=7 target_nodeids=7 target_treeids=7 target_weights=6
3/1/18c2/1/12/aggregate_function=3 base_values=6 base_values_as_tensor=4 n_targets=2 nodes_falsenodeids=7 nodes_featureids=7 nodes_hitrates=6 nodes_hitrates_as_tensor=4 nodes_missing_value_tracks_true=7 nodes_modes=8 nodes_nodeids=7 nodes_treeids=7 nodes_truenodeids=7 nodes_values=6 nodes_values_as_tensor=4 post_transform=3 target_ids=7 target_nodeids=7 target_treeids=7 target_weights=6 target_weights_as_tensor=4""",
    "com.microsoft.nchwc:AveragePool": """\
1/1/12/1/12/auto_pad=3 ceil_mode=2 count_include_pad=2 dilations=7 kernel_shape=7! pads=7 strides=7""",
    "com.microsoft.nchwc:Conv": """\
1/2/12 12 ?2 ?2/1/12/activation=3 activation_params=6 auto_pad=3 dilations=7 group=2 kernel_shape=7 pads=7 strides=7""",
    "com.microsoft.nchwc:GlobalAveragePool": """\
1/1/12/1/12/""",
    "com.microsoft.nchwc:GlobalMaxPool": """\
1/1/12/1/12/""",
    "com.microsoft.nchwc:MaxPool": """\
1/1/12/1/12/auto_pad=3 ceil_mode=2 dilations=7 kernel_shape=7! pads=7 storage_order=2 strides=7""",
    "com.microsoft.nchwc:ReorderInput": """\
1/1/12/1/12/channels_last=2""",
    "com.microsoft.nchwc:ReorderOutput": """\
1/1/12/1/12/channels=2 channels_last=2""",
    "com.microsoft.nchwc:Upsample": """\
1/1/12/1/12/coordinate_transformation_mode=3 mode=3 scales=7""",
    "com.microsoft:Attention": """\
1/2/110402 110402 ?10402 ?40 ?10402 ?10402 ?40/1/110402 ?10402/do_rotary=2 mask_filter_value=1 num_heads=2! past_present_share_buffer=2 qkv_hidden_sizes=7 rotary_embedding_dim=2 scale=1 unidirectional=2""",
    "com.microsoft:BiasGelu": """\
1/2/110c02 110c02/1/110c02/""",
    "com.microsoft:DequantizeLinear": """\
1/2/160007c 1402 ?60007c/1/1402/axis=2""",
    "com.microsoft:DynamicQuantizeLSTM": """\
1/12/12 1c 1c ?2 ?40 ?2 ?2 ?2 12 1c 12 1c/0/?2 ?2 ?2/activation_alpha=6 activation_beta=6 activations=8 clip=1 direction=3 hidden_size=2 input_forget=2""",
    "com.microsoft:DynamicQuantizeMatMul": """\
1/3/12 1c 12 ?c ?2/1/12/""",
    "com.microsoft:EmbedLayerNormalization": """\
1/7/140 ?40 1402 1402 ?402 1402 1402 ?40 ?40/1/1402 ?40 ?402/epsilon=1 mask_index_type=2""",
    "com.microsoft:ExpandDims": """\
1/2/1fffe 140/1/1fffe/""",
    "com.microsoft:FastGelu": """\
1/1/110c02 ?10c02/1/110c02/""",
    "com.microsoft:FusedConv": """\
1/2/1c02 1c02 ?c02 ?c02/1/1c02/activation=3 activation_params=6 auto_pad=3 dilations=7 group=2 kernel_shape=7 pads=7 strides=7""",
    "com.microsoft:FusedGemm": """\
1/2/13cc2 13cc2 ?3cc2/1/13cc2/activation=3 activation_alpha=1 activation_beta=1 activation_gamma=1 alpha=1 beta=1 transA=2 transB=2""",
    "com.microsoft:FusedMatMul": """\
1/2/110c02 110c02/1/110c02/alpha=1 transA=2 transB=2 transBatchA=2 transBatchB=2""",
    "com.microsoft:GatherND": """\
1/2/1fffe 1c0/1/1fffe/""",
    "com.microsoft:Gelu": """\
1/1/110c02/1/110c02/""",
    "com.microsoft:GridSample": """\
1/2/1fffe 1fffe/1/1c02/align_corners=2 mode=3 padding_mode=3""",
    "com.microsoft:Inverse": """\
1/1/1c02/1/1c02/""",
    "com.microsoft:MatMulIntegerToFloat": """\
1/4/1c 1c 1402 1402 ?c ?c ?402/1/1402/""",
    "com.microsoft:MatMulNBits": """\
1/3/110402 14 110402 ?10406 ?40 ?10402/1/110402/K=2! N=2! accuracy_level=2 bits=2 block_size=2! weight_prepacked=2""",
    "com.microsoft:MultiHeadAttention": """\
1/1/110402 ?10402 ?10402 ?10402 ?40 ?10402 ?10402 ?10402 ?40 ?40/1/110402 ?10402 ?10402 ?10402/mask_filter_value=1 num_heads=2! scale=1 unidirectional=2""",
    "com.microsoft:NhwcMaxPool": """\
1/1/1c/1/1c/auto_pad=3 ceil_mode=2 dilations=7 kernel_shape=7! pads=7 strides=7""",
    "com.microsoft:Pad": """\
1/2/1c02 180 ?c02/1/1c02/mode=3""",
    "com.microsoft:QAttention": """\
1/5/1c 1c 1402 1402 1402 ?40 ?c ?c ?402/1/1402 ?402/do_rotary=2 mask_filter_value=1 num_heads=2! past_present_share_buffer=2 scale=1 unidirectional=2""",
    "com.microsoft:QGemm": """\
1/6/1c 12 1c 1c 12 1c ?40 ?2 ?c/1/1e/alpha=1 transA=2 transB=2""",
    "com.microsoft:QLinearAdd": """\
1/7/1c 12 ?c 1c 12 ?c 12 ?c/1/1c/""",
    "com.microsoft:QLinearAveragePool": """\
1/4/1c 12 ?c 12 ?c/1/1c/auto_pad=3 ceil_mode=2 channels_last=2 count_include_pad=2 kernel_shape=7! pads=7 strides=7""",
    "com.microsoft:QLinearConcat": """\
1/3/12 1c *e/1/1c/axis=2!""",
    "com.microsoft:QLinearConv": """\
1/8/1c 12 1c 1c 12 1c 12 1c ?40/1/1c/auto_pad=3 channels_last=2 dilations=7 group=2 kernel_shape=7 pads=7 strides=7""",
    "com.microsoft:QLinearGlobalAveragePool": """\
1/5/1c 12 1c 12 1c/1/1c/channels_last=2""",
    "com.microsoft:QLinearLeakyRelu": """\
1/4/1c 12 ?c 12 ?c/1/1c/alpha=1""",
    "com.microsoft:QLinearMul": """\
1/7/1c 12 ?c 1c 12 ?c 12 ?c/1/1c/""",
    "com.microsoft:QLinearSigmoid": """\
1/4/1c 12 ?c 12 ?c/1/1c/""",
    "com.microsoft:QLinearSoftmax": """\
1/5/1c 12 ?c 12 1c/1/1c/axis=2 opset=2!""",
    "com.microsoft:QLinearWhere": """\
1/9/1200 1c 12 1c 1c 12 1c 12 1c/1/1c/""",
    "com.microsoft:QuantizeLinear": """\
1/2/1402 1402 ?60003c/1/160003c/axis=2""",
    "com.microsoft:QuickGelu": """\
1/1/110c02/1/110c02/alpha=1""",
    "com.microsoft:RotaryEmbedding": """\
1/4/110402 180 110402 110402/1/110402/interleaved=2 is_packed_batching=2 num_heads=2 rotary_embedding_dim=2 scale=1""",
    "com.microsoft:SkipLayerNormalization": """\
1/3/110402 110402 110402 ?10402 ?10402/1/110402 ?2 ?2 ?10402/epsilon=1""",
    "com.microsoft:SkipSimplifiedLayerNormalization": """\
1/3/110402 110402 110402 ?10402/1/110402 ?2 ?2 ?10402/epsilon=1""",
    "com.microsoft:Trilu": """\
1/1/113efe ?80/1/113efe/upper=2""",
}
