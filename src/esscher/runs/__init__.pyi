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
from .export import export_run as export_run
from .survey import begin_group as begin_group, read_group as read_group
from .job import (
    JOBS as JOBS,
    Job as Job,
    find_job as find_job,
    read_spec as read_spec,
    register as register,
)
from .manifest import Failure as Failure, Manifest as Manifest
from .progress import Progress as Progress, terminal as terminal, watched as watched
from .run import Run as Run, list_runs as list_runs, load_run as load_run
from .spec import RunSpec as RunSpec, Unit as Unit
from .tables import Shard as Shard, concatenate as concatenate
