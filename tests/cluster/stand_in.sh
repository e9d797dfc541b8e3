#!/bin/bash
# Stands for Python in tests of the job scripts alone (ULORL_PYTHON): says where it runs and what it was given.
# run.dir is $RUN; "train" ends at once with code $TRAIN_CODE, "serve" with SIGUSR2.
shift 2 # -m ulorl_megatron.cli
case $1 in
    config) printf 'run:\n  dir: %s\n' "$RUN" ;;
    *) echo "$1 host=$SLURMD_NODENAME task=$SLURM_PROCID/$SLURM_STEP_NUM_TASKS gpus=$CUDA_VISIBLE_DEVICES given=${*:2}" ;;
esac
case $1 in
    serve) trap 'exit 0' USR2; sleep 300 & wait $! ;;
    train) sleep 1; exit "${TRAIN_CODE:-0}" ;;
esac
