"""parallel(scheduler, count, task, args): task(0, *args) … task(count - 1, *args), on as many threads as there are."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onnxgrad.cpu.core.jit import machine_code

INT64 = ir.IntType(64)


@machine_code
def parallel(typing_context: Any, scheduler: Any, count: Any, task: Any, args: Any) -> Any:
    """Calls a compiled function for every number below `count`; tasks must not depend on one another, nor raise.

    `scheduler` is the address of a C function (task_loop, work, count) that calls task_loop(work) from some threads and
    returns when all are done, or 0 for none. The loop draws numbers from an atomic counter, so threads share evenly.
    """
    task_signature = task.get_call_type(typing_context, (types.int64, *args.types), {})

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        scheduler_address, task_count, _, packed = values
        compiled = task.dispatcher.get_compile_result(task_signature)
        context.active_code_library.add_linking_library(compiled.library)

        # work: the next task's number, how many there are, the task's arguments
        work_type = ir.LiteralStructType([INT64, INT64, packed.type])
        work = cgutils.alloca_once(builder, work_type)
        for position, value in enumerate((INT64(0), task_count, packed)):
            builder.store(value, cgutils.gep_inbounds(builder, work, 0, position))

        loop_type = ir.FunctionType(ir.VoidType(), [work_type.as_pointer()])
        name = builder.module.get_unique_name(f"{compiled.fndesc.unique_name}_task_loop")
        task_loop = ir.Function(builder.module, loop_type, name)
        task_loop.linkage = "internal"
        _fill_task_loop(context, task_loop, compiled.fndesc, task_signature, len(args.types))

        alone = builder.icmp_signed("==", scheduler_address, INT64(0))
        with builder.if_else(alone) as (serial, shared):
            with serial:
                builder.call(task_loop, [work])
            with shared:
                schedule_type = ir.FunctionType(ir.VoidType(), [INT64, INT64, INT64]).as_pointer()
                schedule = builder.inttoptr(scheduler_address, schedule_type)
                addresses = [builder.ptrtoint(pointer, INT64) for pointer in (task_loop, work)]
                builder.call(schedule, [*addresses, task_count])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, task, args), generate


def _fill_task_loop(context: Any, loop: ir.Function, task: Any, signature: Any, arguments: int) -> None:
    work = loop.args[0]
    builder = ir.IRBuilder(loop.append_basic_block("entry"))
    draw, body, done = (loop.append_basic_block(name) for name in ("draw", "body", "done"))
    count = builder.load(cgutils.gep_inbounds(builder, work, 0, 1))
    packed = builder.load(cgutils.gep_inbounds(builder, work, 0, 2))
    unpacked = cgutils.unpack_tuple(builder, packed, arguments)
    builder.branch(draw)
    builder.position_at_end(draw)
    counter = cgutils.gep_inbounds(builder, work, 0, 0)
    number = builder.atomic_rmw("add", counter, INT64(1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", number, count), body, done)
    builder.position_at_end(body)
    context.call_internal_no_propagate(builder, task, signature, [number, *unpacked])
    builder.branch(draw)
    builder.position_at_end(done)
    builder.ret_void()
