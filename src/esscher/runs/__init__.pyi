from .columns import Column as Column
from .engine import execute as execute, resume as resume
from .errors import (
    Damaged as Damaged,
    RunError as RunError,
    RunIncomplete as RunIncomplete,
    RunInterrupted as RunInterrupted,
    RunLocked as RunLocked,
    StoreError as StoreError,
)
from .progress import Progress as Progress, terminal as terminal, watched as watched
from .run import (
    Failure as Failure,
    Manifest as Manifest,
    Run as Run,
    export_run as export_run,
    list_runs as list_runs,
    load_run as load_run,
)
from .spec import (
    JOBS as JOBS,
    Job as Job,
    RunSpec as RunSpec,
    Unit as Unit,
    find_job as find_job,
    read_spec as read_spec,
    register as register,
)
from .tables import Shard as Shard, concatenate as concatenate
