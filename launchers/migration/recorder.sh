# Read by every bash of the jail before a person's script (BASH_ENV): the programs that train are
# recorded with their arguments and not started. Directories and files of the person are not there,
# so the current directory is only a name.
PATH=/usr/bin:/bin
PWD=$ASYNC_RL_DIRECTORY

_record() {
    printf '%s\0' "$@" >>/tmp/recorded
    printf '\1\0' >>/tmp/recorded
}
command_not_found_handle() { _record "$@"; }
for _name in python python3 torchrun accelerate deepspeed ray uv trl srun sbatch; do
    eval "$_name() { _record $_name \"\$@\"; }"
done
for _name in sleep pip pip3 curl wget git nvidia-smi conda ulimit module modprobe; do
    eval "$_name() { return 0; }"
done
# Functions win over builtins, so a script that replaces itself by its trainer is recorded too.
exec() { "$@"; }
source() { [ ! -r "$1" ] || builtin source "$@"; }
.() { source "$@"; }
cd() {
    case "$1" in
        /*) PWD=$1 ;;
        "" | .) ;;
        *) PWD=$PWD/$1 ;;
    esac
}
pwd() { printf '%s\n' "$PWD"; }
