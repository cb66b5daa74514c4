# ruff: noqa: ANN001, ANN201, ANN202 - Triton compiles these functions; their arguments are its own tensors
# ruff: noqa: N803, N806 - constants known to the compiler in capitals, as in Triton's own kernels
# ruff: noqa: PLR0124, PLR0915, RET505 - branches are taken while they are compiled; a NaN is no number, not itself
"""The kernel of an LSTM or GRU layer: all of its steps in one launch, in Gluon, Triton's language of explicit layouts.

A block computes ``UNITS`` hidden units of ``ROWS`` sequences, and holds the recurrent weights of these units in
registers. A thread multiplies the same elements of the hidden state in each step. It reads them as soon as other blocks
have written them; the sums over all threads of a block go through shared memory.

Blocks meet in the output, and at no barrier: before the launch all bits of ``y`` are set, a NaN that no step writes,
and a reader polls the elements of the step before until it finds no such bits. Each element is written once, so a fast
block cannot overwrite what a slow one has yet to read. An element is its own flag, so relaxed loads and stores do. All
blocks must be resident at once, or those that run would wait for ever for those that do not: the launch is cooperative.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def poll_assembly(hidden, directions, rows, values, lanes, nbytes, is_bfloat16):
    """Return PTX that reads ``values`` elements of each of ``rows`` sequences as float32, when all have been written.

    A thread reads 16 bytes, if it needs as many, then the ones that are ``lanes`` times as far. Operands are the
    results, the address of the first element, and its index; elements from index ``hidden`` on are zeros.
    """
    chunk = min(16 // nbytes, values)
    words = chunk * nbytes // 4
    chunks, total = values // chunk, rows * values * nbytes // 4
    vector = {1: "", 2: ".v2", 4: ".v4"}[words]
    address, index = rows * values, rows * values + 1
    lines = [f".reg .b32 w<{total}>, any<{2 * total}>;", f".reg .pred is<{chunks}>, again;", ".reg .b16 low, high;"]
    lines += [f"mov.b32 w{n}, 0;" for n in range(total)]
    lines += [f"setp.lt.s32 is{n}, ${index}, {hidden - n * lanes * chunk};" for n in range(chunks)]
    lines.append("poll:")
    for row in range(rows):
        for n in range(chunks):
            first = (row * chunks + n) * words
            names = ", ".join(f"w{first + word}" for word in range(words))
            offset = (row * directions * hidden + n * lanes * chunk) * nbytes
            names = f"{{{names}}}" if vector else names
            lines.append(f"@is{n} ld.relaxed.gpu.global{vector}.b32 {names}, [${address} + {offset}];")
    # Each "any" is all ones, or in half precision not zero, where an element has not been written.
    for n in range(total):
        if nbytes == 4:
            lines.append(f"mov.b32 any{n}, w{n};")
        else:  # whether a half of the complement is zero: (x - 0x00010001) & ~x & 0x80008000
            lines += [f"sub.u32 any{n}, 0xfffefffe, w{n};", f"and.b32 any{n}, any{n}, w{n};"]
            lines.append(f"and.b32 any{n}, any{n}, 0x80008000;")
    first, last = 0, total
    while last - first > 1:
        join = "max.u32" if nbytes == 4 else "or.b32"
        lines.append(f"{join} any{last}, any{first}, any{first + 1};")
        first, last = first + 2, last + 1
    test = "eq.u32 again, any{}, 0xffffffff" if nbytes == 4 else "ne.u32 again, any{}, 0"
    # All threads of a warp read again, so that they stay together.
    lines += [f"setp.{test.format(first)};", "vote.sync.any.pred again, again, 0xffffffff;", "@again bra.uni poll;"]
    for n in range(total):
        if nbytes == 4:
            lines.append(f"mov.b32 ${n}, w{n};")
        elif is_bfloat16:
            lines += [f"shl.b32 any0, w{n}, 16;", f"mov.b32 ${2 * n}, any0;"]
            lines += [f"and.b32 any0, w{n}, 0xffff0000;", f"mov.b32 ${2 * n + 1}, any0;"]
        else:
            lines.append(f"mov.b32 {{low, high}}, w{n};")
            lines += [f"cvt.f32.f16 ${2 * n}, low;", f"cvt.f32.f16 ${2 * n + 1}, high;"]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def poll_constraints(count):
    """Return the constraints of the operands of `poll_assembly`."""
    return "=f," * count + "l,r"


@gluon.constexpr_function
def poll_types(count):
    """Return the types of the results of `poll_assembly`."""
    return (gl.float32,) * count


@gluon.constexpr_function
def publish_assembly(nbytes, count):
    """Return PTX that stores an element where its flag is set; of threads with equal ones the first does."""
    store = "st.relaxed.gpu.global.b16 [$1], low" if nbytes == 2 else "st.relaxed.gpu.global.b32 [$1], $2"
    return f"""{{
        .reg .pred is;
        .reg .b32 thread;
        .reg .b16 low, high;
        mov.u32 thread, %tid.x;
        setp.lt.u32 is, thread, {count};
        setp.ne.and.b32 is, $3, 0, is;
        mov.b32 {{low, high}}, $2;
        @is {store};
        mov.u32 $0, 0;
        }}"""


@gluon.constexpr_function
def activation_assembly(scale):
    """Return PTX of 1 / (1 + 2 ** (scale x)) in float32."""
    return f"""{{
        .reg .f32 term;
        mul.f32 term, $1, {scale};
        ex2.approx.ftz.f32 term, term;
        add.f32 term, term, 1.0;
        rcp.approx.ftz.f32 $0, term;
        }}"""


@gluon.jit
def recurrence(
    gates_ptr,
    weight_ptr,
    bias_ptr,
    h_ptr,
    c_ptr,
    y_ptr,
    last_h_ptr,
    last_c_ptr,
    STEPS: gl.constexpr,
    BATCH: gl.constexpr,
    HIDDEN: gl.constexpr,
    DIRECTIONS: gl.constexpr,
    STEP_STRIDE: gl.constexpr,
    BATCH_STRIDE: gl.constexpr,
    UNITS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_R: gl.constexpr,
    WIDTH: gl.constexpr,
    TRIGGER: gl.constexpr,
):
    """Compute ``y`` (steps, batch, directions, hidden) and the last states (directions, batch, hidden).

    Without c the layer is a GRU. ``gates`` (steps, batch, directions, gates of torch's order, hidden) are the products
    of the inputs and the biases, ``weight`` (directions, gates, hidden, hidden) and a GRU's ``bias`` (directions,
    hidden), within the reset gate, are the recurrent ones. Initial states of None are zeros. ``BLOCK_R`` and ``WIDTH``
    are the powers of two above ``ROWS`` and the hidden size; the second direction begins with the last step.
    """
    gl.static_assert(TRIGGER == "none")
    IS_LSTM: gl.constexpr = last_c_ptr is not None
    GATES: gl.constexpr = 4 if IS_LSTM else 3
    WARPS: gl.constexpr = gl.num_warps()
    NBYTES: gl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth // 8
    # Units of a warp beside one another in its lanes; the other lanes divide the hidden state.
    ACROSS: gl.constexpr = min(UNITS, 4)
    LANES: gl.constexpr = 32 // ACROSS
    VALUES: gl.constexpr = WIDTH // (WARPS * LANES)
    CHUNK: gl.constexpr = min(16 // NBYTES, VALUES)
    TERMS: gl.constexpr = gl.BlockedLayout(
        [1, 1, UNITS // ACROSS], [1, LANES, ACROSS], [WARPS, 1, 1], [2, 1, 0]
    )
    READ: gl.constexpr = gl.SliceLayout(2, TERMS)
    # Parts of sums of each warp, unit, row and gate: a thread adds the parts of a cell, which has four gates beside one
    # another.
    PARTS: gl.constexpr = gl.BlockedLayout(
        [WARPS, 1, 1, 4], [1, UNITS, 32 // UNITS, 1], [1, 1, WARPS, 1], [3, 0, 1, 2]
    )
    CELLS: gl.constexpr = gl.BlockedLayout([1, 1], [UNITS, 32 // UNITS], [1, WARPS], [0, 1])

    block = gl.program_id(0)
    unit_0 = block % (HIDDEN // UNITS) * UNITS
    rest = block // (HIDDEN // UNITS)
    row_0 = rest % (BATCH // ROWS) * ROWS
    direction = rest // (BATCH // ROWS)

    # The elements of the hidden state that a thread multiplies, by the first of each chunk; and their weights.
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, READ))
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, READ))
    start = (warp * (WIDTH // WARPS))[:, None] + (lane * CHUNK)[None, :]
    unit = unit_0 + gl.arange(0, UNITS, layout=gl.SliceLayout(0, gl.SliceLayout(1, TERMS)))
    weights = _weights(weight_ptr, direction * GATES * HIDDEN + unit, start, HIDDEN, GATES, VALUES, LANES, CHUNK)
    state = ()
    for row in gl.static_range(ROWS):
        state += _state(h_ptr, (direction * BATCH + row_0 + row) * HIDDEN, start, HIDDEN, VALUES, LANES, CHUNK)

    # The cells of the block.
    row = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, CELLS))[None, :]
    units = unit_0 + gl.arange(0, UNITS, layout=gl.SliceLayout(1, CELLS))[:, None]
    is_cell = (row < ROWS) & (units < HIDDEN)
    rows = row_0 + row
    cell = (direction * BATCH + rows) * HIDDEN + units
    h = gl.zeros([UNITS, BLOCK_R], gl.float32, CELLS)
    c = gl.zeros([UNITS, BLOCK_R], gl.float32, CELLS)
    if h_ptr is not None:
        h = gl.load(h_ptr + cell, mask=is_cell, other=0.0).to(gl.float32)
    if c_ptr is not None:
        c = gl.load(c_ptr + cell, mask=is_cell, other=0.0).to(gl.float32)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + direction * HIDDEN + units).to(gl.float32)
    else:
        bias = gl.zeros([UNITS, 1], gl.float32, CELLS)
    shared = gl.allocate_shared_memory(
        gl.float32, [WARPS, UNITS, BLOCK_R, 4], gl.SwizzledSharedLayout(1, 1, 1, order=[3, 2, 1, 0])
    )
    gate_0 = gates_ptr + rows.to(gl.int64) * BATCH_STRIDE + direction * GATES * HIDDEN + units
    first = direction * (STEPS - 1)
    inputs = _inputs(gate_0 + first.to(gl.int64) * STEP_STRIDE, is_cell, HIDDEN, GATES)

    for t in range(STEPS):
        parts = ()
        for n in gl.static_range(4 * BLOCK_R):
            # There is no fourth gate in a GRU, and no row in the padding: any part will do.
            parts += (_part(weights, state, min(n % 4, GATES - 1), min(n // 4, ROWS - 1), VALUES),)
        shared.store(_stacked(parts, [WARPS, UNITS, BLOCK_R, 4]))
        sums = _gates(gl.sum(shared.load(PARTS), axis=0), CELLS)
        if IS_LSTM:
            c = _sigmoid(inputs[1] + sums[1]) * c + _sigmoid(inputs[0] + sums[0]) * _tanh(inputs[2] + sums[2])
            h = _sigmoid(inputs[3] + sums[3]) * _tanh(c)
        else:
            new = _tanh(inputs[2] + _sigmoid(inputs[0] + sums[0]) * (sums[2] + bias))
            h = new + _sigmoid(inputs[1] + sums[1]) * (h - new)
        rounded = h.to(y_ptr.dtype.element_ty)
        h = rounded.to(gl.float32)

        step = t + direction * (STEPS - 1 - 2 * t)
        out = y_ptr + step.to(gl.int64) * (BATCH * DIRECTIONS * HIDDEN)
        _publish(out + (rows * DIRECTIONS + direction) * HIDDEN + units, rounded, is_cell, BLOCK_R * UNITS)
        following = first + (1 - 2 * direction) * min(t + 1, STEPS - 1)
        inputs = _inputs(gate_0 + following.to(gl.int64) * STEP_STRIDE, is_cell, HIDDEN, GATES)
        # After the last step there is nothing to wait for.
        wanted = gl.where(t + 1 < STEPS, start, HIDDEN)
        state = gl.inline_asm_elementwise(
            poll_assembly(HIDDEN, DIRECTIONS, ROWS, VALUES, LANES, NBYTES, y_ptr.dtype.element_ty == gl.bfloat16),
            poll_constraints(ROWS * VALUES),
            [(out + (row_0 * DIRECTIONS + direction) * HIDDEN + start).to(gl.int64), wanted],
            dtype=poll_types(ROWS * VALUES),
            is_pure=False,
            pack=1,
        )
    gl.store(last_h_ptr + cell, h.to(last_h_ptr.dtype.element_ty), mask=is_cell)
    if IS_LSTM:
        gl.store(last_c_ptr + cell, c.to(last_c_ptr.dtype.element_ty), mask=is_cell)


@gluon.jit
def _weights(
    weight_ptr,
    unit,
    start,
    HIDDEN: gl.constexpr,
    GATES: gl.constexpr,
    VALUES: gl.constexpr,
    LANES: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """Load a thread's weights of each gate, of each of its elements of the hidden state, in float32."""
    weights = ()
    for n in gl.static_range(GATES * VALUES):
        k = gl.expand_dims(start + (n % VALUES // CHUNK * LANES * CHUNK + n % CHUNK), 2)
        at = weight_ptr + (n // VALUES * HIDDEN + unit)[None, None, :] * HIDDEN + k
        weights += (gl.load(at, mask=k < HIDDEN, other=0.0).to(gl.float32),)
    return weights


@gluon.jit
def _state(
    h_ptr, row, start, HIDDEN: gl.constexpr, VALUES: gl.constexpr, LANES: gl.constexpr, CHUNK: gl.constexpr
):
    """Load a thread's elements of the initial state of a row, in float32; zeros without one."""
    state = ()
    for n in gl.static_range(VALUES):
        k = start + (n // CHUNK * LANES * CHUNK + n % CHUNK)
        if h_ptr is None:
            state += (gl.zeros_like(k.to(gl.float32)),)
        else:
            state += (gl.load(h_ptr + row + k, mask=k < HIDDEN, other=0.0).to(gl.float32),)
    return state


@gluon.jit
def _part(weights, state, GATE: gl.constexpr, ROW: gl.constexpr, VALUES: gl.constexpr):
    """Return a warp's part of the products of a gate and a row, in all of its lanes."""
    total = weights[GATE * VALUES] * gl.expand_dims(state[ROW * VALUES], 2)
    for n in gl.static_range(1, VALUES):
        total += weights[GATE * VALUES + n] * gl.expand_dims(state[ROW * VALUES + n], 2)
    return gl.sum(total, axis=1)


@gluon.jit
def _stacked(parts, SHAPE: gl.constexpr):
    """Return tensors (a power of two) beside one another along a new last axis, in ``SHAPE``."""
    half: gl.constexpr = len(parts) // 2
    if half == 0:
        return gl.reshape(parts[0], SHAPE)
    else:
        pairs = ()
        for n in gl.static_range(half):
            pairs += (gl.join(parts[n], parts[n + half]),)
        return _stacked(pairs, SHAPE)


@gluon.jit
def _gates(total, CELLS: gl.constexpr):
    """Return the sums of each of four gates, which are the last axis of ``total``."""
    even, odd = gl.split(gl.reshape(total, [total.shape[0], total.shape[1], 2, 2]))
    gates = gl.split(even) + gl.split(odd)
    gates = gates[0], gates[2], gates[1], gates[3]
    cells = ()
    for gate in gl.static_range(4):
        cells += (gl.convert_layout(gates[gate], CELLS, assert_trivial=True),)
    return cells


@gluon.jit
def _inputs(at, is_cell, HIDDEN: gl.constexpr, GATES: gl.constexpr):
    """Load the products of the inputs of each gate, in float32."""
    inputs = ()
    for gate in gl.static_range(GATES):
        inputs += (gl.load(at + gate * HIDDEN, mask=is_cell, other=0.0).to(gl.float32),)
    return inputs


@gluon.jit
def _publish(at, value, is_cell, COUNT: gl.constexpr):
    """Store the results of a step for the other blocks; a NaN is stored as one that is not `UNWRITTEN`."""
    NBYTES: gl.constexpr = value.dtype.primitive_bitwidth // 8
    if NBYTES == 2:
        bits = gl.where(value == value, value.to(gl.int16, bitcast=True).to(gl.int32), 0x7FFF)
    else:
        bits = gl.where(value == value, value.to(gl.int32, bitcast=True), 0x7FFFFFFF)
    gl.inline_asm_elementwise(
        publish_assembly(NBYTES, COUNT),
        "=r,l,r,r",
        [at.to(gl.int64), bits, is_cell.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _sigmoid(x):
    return _inverse_of_one_plus_exp2(x, "0fbfb8aa3b")  # -log2(e)


@gluon.jit
def _tanh(x):
    return 2.0 * _inverse_of_one_plus_exp2(x, "0fc038aa3b") - 1.0  # -2 log2(e)


@gluon.jit
def _inverse_of_one_plus_exp2(x, SCALE: gl.constexpr):
    """Return 1 / (1 + 2 ** (SCALE x)), without the care for denormal numbers that Triton's exp and division take."""
    return gl.inline_asm_elementwise(
        activation_assembly(SCALE), "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )
