"""Random valid schedules, for tests of concurrency."""

import random

from nimblec.base.ir import Schedule
from nimblec.schedule.dag import Dag
from nimblec.schedule.streams import arrange


def random_schedule(dag: Dag, seed: int) -> Schedule:
    """Draw a valid schedule from ``seed``."""
    generator = random.Random(seed)  # noqa: S311 - not for secrets
    stream_count = generator.randint(1, max(1, min(16, dag.task_count)))
    successors = dag.successors
    missing = [len(before) for before in dag.predecessors]
    ready = [task for task, count in enumerate(missing) if count == 0]
    order = []
    while ready:
        task = ready.pop(generator.randrange(len(ready)))
        order.append(task)
        for successor in successors[task]:
            missing[successor] -= 1
            if missing[successor] == 0:
                ready.append(successor)
    return arrange(dag, order, [generator.randrange(stream_count) for _ in order])
