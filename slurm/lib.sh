# shellcheck shell=bash
# Sourced by the scripts beside it, which set `home`: the site, the command, and the life of a training job.

say() { echo "[$(date +%T)] $*"; }

# --- The site. slurm/site.env, or the file in ULORL_SITE, says what differs from machine to machine.
site=${ULORL_SITE:-$home/slurm/site.env}
# shellcheck source=site.env.example
[ ! -f "$site" ] || source "$site"
# shellcheck disable=SC2086  # a list of names
[ -z "${MODULES:-}" ] || module load $MODULES
export PYTHONPATH=$home${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

python=("${ULORL_PYTHON:-$home/.venv/bin/python}")
in_step=() # srun's options of every step
if [ -n "${CONTAINER:-}" ]; then
    python=("${ULORL_PYTHON:-python3}")
    mounts=${CONTAINER_MOUNTS:+$CONTAINER_MOUNTS,}$home:$home
    case ${CONTAINER_BY:-apptainer} in
        apptainer) python=(apptainer exec --nv --bind "$mounts" "$CONTAINER" "${python[@]}") ;;
        pyxis) in_step+=(--container-image="$CONTAINER" --container-mounts="$mounts" --container-workdir="$PWD") ;;
        *) say "CONTAINER_BY=$CONTAINER_BY in $site is neither apptainer nor pyxis"; exit 2 ;;
    esac
fi

# Becomes srun: in the background, as $(...), or as the last line of a script.
ulorl() { exec srun "${in_step[@]}" "${step[@]}" "${python[@]}" -m ulorl_megatron.cli "$@"; }

say "job $SLURM_JOB_ID ($SLURM_JOB_NAME), start $((${SLURM_RESTART_COUNT:-0} + 1)), by ${SLURM_JOB_USER:-$USER}"
say "project $home, site $([ -f "$site" ] && echo "$site" || echo "none ($site is not there)"), folder $PWD"
say "python ${in_step[*]} ${python[*]}"

# --- How an allocation is split. Sets the options of the two steps, and how many ranks and servers they have.

# One component of a het job for each.
split_components() {
    local nodes=$SLURM_JOB_NUM_NODES_HET_GROUP_1 gpus=${SLURM_GPUS_PER_NODE_HET_GROUP_1:-${SLURM_GPUS_ON_NODE:-0}}
    servers=$SLURM_NTASKS_HET_GROUP_1 ranks=$SLURM_NTASKS_HET_GROUP_0
    gpus=${gpus##*:}
    training=(--het-group=0 --cpus-per-task="${SLURM_CPUS_PER_TASK_HET_GROUP_0:-1}")
    serving=(--het-group=1 --cpus-per-task="${SLURM_CPUS_PER_TASK_HET_GROUP_1:-1}")
    serving+=(--gpus-per-task=$((gpus * nodes / servers)))
    say "$ranks ranks on $SLURM_JOB_NODELIST_HET_GROUP_0, $servers servers on $SLURM_JOB_NODELIST_HET_GROUP_1"
}

# The last ROLLOUT_NODES nodes for SERVERS_PER_NODE servers each; with ROLLOUT_GPUS instead, so many GPUs of one node.
split_allocation() {
    local per_node=${SERVERS_PER_NODE:-1} gpus=$SLURM_GPUS_ON_NODE cpus=${SLURM_CPUS_PER_TASK:-1} tasks nodes trainers
    tasks=${SLURM_NTASKS_PER_NODE:-$gpus}
    if [ -n "${ROLLOUT_GPUS:-}" ]; then
        servers=$per_node ranks=$((gpus - ROLLOUT_GPUS))
        # --exact and --mem=0: both steps at once, each with GPUs of its own.
        training=(--nodes=1 --exact --mem=0 --ntasks="$ranks" --ntasks-per-node="$ranks" --gpus-per-node="$ranks")
        training+=(--cpus-per-task="$cpus")
        serving=(--nodes=1 --exact --mem=0 --ntasks="$servers" --ntasks-per-node="$servers")
        serving+=(--gpus-per-node="$ROLLOUT_GPUS" --gpus-per-task=$((ROLLOUT_GPUS / servers)))
        serving+=(--cpus-per-task=$((cpus * ROLLOUT_GPUS / servers)))
        say "$SLURM_JOB_NODELIST: $ranks ranks, $servers servers on $ROLLOUT_GPUS GPUs"
        return
    fi
    : "${ROLLOUT_NODES:?"of the $SLURM_JOB_NUM_NODES nodes, how many serve? Or ROLLOUT_GPUS, of a single node"}"
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    trainers=$((${#nodes[@]} - ROLLOUT_NODES))
    servers=$((ROLLOUT_NODES * per_node)) ranks=$((trainers * tasks))
    training=(--nodes="$trainers" --nodelist="$(IFS=,; echo "${nodes[*]:0:trainers}")")
    training+=(--ntasks="$ranks" --ntasks-per-node="$tasks" --gpus-per-node="$gpus" --cpus-per-task="$cpus")
    serving=(--nodes="$ROLLOUT_NODES" --nodelist="$(IFS=,; echo "${nodes[*]:trainers}")")
    serving+=(--ntasks="$servers" --ntasks-per-node="$per_node" --gpus-per-task=$((gpus / per_node)))
    serving+=(--cpus-per-task=$((cpus * tasks / per_node)))
    say "$ranks ranks on ${nodes[*]:0:trainers}, $servers servers on ${nodes[*]:trainers}"
}

# --- The life of a training job.
# SIGUSR1 comes before the time limit (--signal): the trainer cuts its step, saves and ends, and the job is queued again.
# SIGTERM comes with scancel and preemption, to the steps as well: nothing is queued by us.

# CONFIG.yaml [key=value ...]
train() {
    local step=(--nodes=1 --ntasks=1 --overlap) trainer server code=0 stopping=''
    local run=("$@" "run.processes=$ranks" "servers.announced=$((servers + ${EXTRA_SERVERS:-0}))" "servers.urls=[]")
    local resolved
    trap 'stopping=limit' USR1
    trap 'stopping=end' TERM
    resolved=$(ulorl config "${run[@]}") || exit 2 # it has said why
    run_dir=$(sed -n 's/^  dir: //p' <<< "$resolved" | head -n 1)
    mkdir -p "$run_dir"
    [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || rm -f "$run_dir/failures"
    say "run $run_dir, settings ${run[*]}"

    step=("${serving[@]}")
    ulorl serve "${run[@]}" &
    server=$!
    step=("${training[@]}" --wait=60) # a rank that crashes ends the others after 60 s: time for the first to say why
    ulorl train "${run[@]}" &
    trainer=$!
    while kill -0 $trainer 2> /dev/null && kill -0 $server 2> /dev/null && [ -z "$stopping" ]; do nap; done
    if [ -n "$stopping" ]; then
        say "asked to stop ($stopping): the trainer saves"
        kill -USR1 $trainer 2> /dev/null || true
        SECONDS=0
        while kill -0 $trainer 2> /dev/null && [ $SECONDS -lt "${STOP_S:-540}" ]; do nap; done
    elif kill -0 $trainer 2> /dev/null; then
        say "no server is left: see $run_dir/logs/server-*.log"
        code=1
        kill -TERM $trainer 2> /dev/null || true
    fi
    if kill -0 $trainer 2> /dev/null && [ -n "$stopping" ]; then
        say "the trainer has not ended in ${STOP_S:-540} s; what it decoded is stored, the steps since its checkpoint are not"
        code=124
    else
        wait $trainer || code=$?
    fi
    say "the trainer ended with code $code"
    kill -USR2 $server 2> /dev/null || true # which srun passes on without a word
    [ "$code" -eq 124 ] || wait $server || true
    finish "$code" "$stopping"
}

nap() { sleep 1 & wait $! || true; } # unlike a plain sleep it lets a trap run at once

# CODE STOPPING: what becomes of the job.
finish() {
    if [ "$1" -eq 0 ]; then
        rm -f "$run_dir/failures"
        exit 0
    fi
    [ "$2" != end ] || exit "$1"
    if [ "$2" = limit ] || worth_another_try "$1"; then
        say "queued again"
        trap - TERM
        ! scontrol requeue "$SLURM_JOB_ID" || sleep 600 # Slurm ends this script meanwhile
        say "cannot be queued again here; submit the same command, which goes on"
    fi
    exit "$1"
}

# CODE: counts failures of one way, the same code with no checkpoint in between; false from the third in a row on.
worth_another_try() {
    local way count=0 before=''
    way="code $1 after $(cat "$run_dir/checkpoints/latest" 2> /dev/null || echo the start)"
    if [ -f "$run_dir/failures" ]; then
        read -r count before < "$run_dir/failures"
        [ "$before" = "$way" ] || count=0
    fi
    echo "$((count + 1)) $way" > "$run_dir/failures"
    [ $((count + 1)) -lt 3 ] || { say "failed three times in a row: $way"; false; }
}
