# The first signal lets the run save. Slurm sends one to this shell before the time limit; so does
# `scancel --batch --signal=TERM JOB`.
training= stopping= at_limit= again= steps=()
stop() {
    stopping=1
    if [[ $training ]]; then kill -TERM "$training" 2>/dev/null; fi
}
trap stop TERM
trap 'at_limit=1; stop' USR1

# Ray on every node, with the head on the first, where this script runs. Other jobs may use the same hosts: ports are
# free ones, temporary directories are private, and so is the token without which nobody can connect.
export RAY_USAGE_STATS_ENABLED=0 @NO_IDLE_WORKERS@ PYTHONUNBUFFERED=1 RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
if [[ $SLURM_CPUS_PER_TASK ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
nodes=("$python" -P -m dapo_rl.launch.ray_nodes)
ray=("${nodes[@]}" start --num-cpus=@CPUS@ --min-worker-port=0 --max-worker-port=0
    --dashboard-agent-listen-port=0 --log-color=false)
ray_log=$run/ray-$SLURM_JOB_ID.log

end() {
    code=$?
    trap '' TERM USR1
    if (( ${#steps[@]} )); then
        kill -TERM "${steps[@]}" 2>/dev/null
        wait "${steps[@]}"
    fi
    trap - TERM
    if [[ $again ]]; then scontrol requeue "$SLURM_JOB_ID" && sleep 60; fi  # Slurm ends this script meanwhile
    exit "$code"
}
trap end EXIT

free=($("${nodes[@]}" free)) || exit
address=${free[0]}:${free[1]}
srun --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" "${ray[@]}" --head --include-dashboard=false \
    --node-ip-address="${free[0]}" --port="${free[1]}" --ray-client-server-port="${free[2]}" &>>"$ray_log" &
steps+=($!)
if (( SLURM_JOB_NUM_NODES > 1 )); then
    others=$((SLURM_JOB_NUM_NODES - 1))
    "${nodes[@]}" wait "$address" 0 "${steps[@]}" || exit
    srun --label --nodes="$others" --ntasks="$others" --exclude="$SLURMD_NODENAME" "${ray[@]}" \
        --address="$address" &>>"$ray_log" &
    steps+=($!)
fi
"${nodes[@]}" wait "$address" "$SLURM_JOB_NUM_NODES" "${steps[@]}" || exit
if [[ $stopping ]]; then exit 143; fi

# A job that is submitted again or requeued resumes the run.
resume=()
if [[ -e $run/@CONFIG@ || -d $run/@CHECKPOINTS@ ]]; then resume=(--resume); fi
"${train[@]}" cluster.address="$address" --run "$run" "${resume[@]}" &
training=$!
wait "$training"
while kill -0 "$training" 2>/dev/null; do wait "$training"; done  # a signal ends a wait
wait "$training"
code=$?

if [[ $until_done && $at_limit && $code == 143 && -d $run/@CHECKPOINTS@ ]]; then
    again=1
    echo "dapo: saved at the time limit; the job goes back to the queue"
fi
exit "$code"
