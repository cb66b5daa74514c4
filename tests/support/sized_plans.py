"""Plans of one program for each of several sizes."""

from programs import bare, planned

from nimblert.plan import Fit, Memcpy, Plan, Pointer, Program, Region, Tensor


def sized(*sizes: int, fit: Fit = Fit.SPLIT, sample_range: tuple[int, int] | None = None) -> Plan:
    """Return a plan that copies x (rows x 3, int32) to y and w (2 x rows) to z, a program for each size of "rows"."""
    return bare(*(_copying(rows, fit, sample_range) for rows in sizes))


def _copying(rows: int, fit: Fit, sample_range: tuple[int, int] | None) -> Program:
    def tensor(name: str, region: Region, index: int, shape: tuple[int, ...]) -> Tensor:
        return Tensor(
            name=name,
            dtype="int32",
            shape=shape,
            strides=(shape[1], 1),
            pointer=Pointer(region=region, index=index, offset=0),
            sample_range=sample_range if region is Region.INPUT else None,
        )

    shapes = ((rows, 3), (2, rows))
    sizes = tuple(4 * a * b for a, b in shapes)
    inputs, outputs = (
        tuple(tensor(name, region, i, shape) for i, (name, shape) in enumerate(zip(names, shapes, strict=True)))
        for names, region in (("xw", Region.INPUT), ("yz", Region.OUTPUT))
    )
    return planned(
        *(
            Memcpy(stream=0, op=0, dst=given.pointer, src=taken.pointer, nbytes=nbytes)
            for taken, given, nbytes in zip(inputs, outputs, sizes, strict=True)
        ),
        name=f"main[rows={rows}]",
        entry="main",
        inputs=inputs,
        outputs=outputs,
        input_nbytes=sizes,
        output_nbytes=sizes,
        arena_nbytes=0,
        profile=(("rows", rows),),
        fits=(fit,),
    )
