"""Stand-ins for container runtimes, which need root: inside, of a test's folder only what is mounted is there."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Literal

from tests.slurm.cluster import Cluster
from tests.slurm.runs import stand_in

Runtime = Literal["apptainer", "pyxis"]
_INSIDE = """
# hidden folder, mounts (a:b, one a line), program …
hidden=$1; mounts=$2; shift 2
stash=/mnt; mount -t tmpfs none "$stash"; number=0
while IFS=: read -r source target _; do
  mkdir "$stash/$((++number))"; mount --bind "$source" "$stash/$number"; targets[number]=$target
done <<< "$mounts"
mount -t tmpfs none "$hidden"
for each in "${!targets[@]}"; do mkdir -p "${targets[each]}"; mount --bind "$stash/$each" "${targets[each]}"; done
exec "$@"
"""


def container_site(cluster: Cluster, folder: Path, runtime: Runtime) -> tuple[Path, tuple[str, ...]]:
    """A site whose steps are in a container that does not have `folder`: what goes before PATH, and the arguments."""
    programs, conf = folder / "bin", folder / "conf"
    inside = stand_in(cluster, programs, "inside", _INSIDE)
    enter = f'unshare --mount bash {inside} {shlex.quote(str(folder))} "$mounts"'
    asked = folder / "asked.txt"
    if runtime == "apptainer":
        words = f"""
        shift; mounts=
        while [[ $1 == --* ]]; do
          if [[ $1 == --bind ]]; then mounts+=$2$'\\n'; shift; fi; shift
        done
        echo "$1" >> {asked}; shift
        mounts=${{mounts%$'\\n'}}
        exec {enter} "$@"
        """
    else:  # a plugin of srun's, which gives it these options
        words = f"""
        while [[ $1 == --* ]]; do
          case $1 in
            --container-image=*) echo "${{1#*=}}" >> {asked} ;;
            --container-mounts=*) mounts=$(tr , '\\n' <<< "${{1#*=}}") ;;
            *) flags+=("$1") ;;
          esac
          shift
        done
        exec $REAL "${{flags[@]}}" {enter} "$@"
        """
    stand_in(cluster, programs, "srun" if runtime == "pyxis" else runtime, words)
    (conf / "site").mkdir(parents=True)
    (folder / "data").mkdir()
    (conf / "site" / "contained.yaml").write_text(
        f"defaults: [local_cluster, _self_]\nname: contained\ndata_dir: {folder}/data\n"
        f"container: {{runtime: {runtime}, image: /images/bench.sqsh, python: {sys.executable}}}\n"
    )
    return programs, ("--conf", str(conf), "site=contained")
