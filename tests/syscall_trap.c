/* Every file-related system call of a process passes through here: it is counted, and one of them may be the last.
 *
 * A seccomp filter turns each such call into a SIGSYS, whoever makes it (libc, the interpreter, any thread); the handler
 * carries it out from the one instruction that the filter lets through. No tracer and no preloading is needed, so that a
 * process can be forked with everything imported, and armed afterwards. Linux on x86-64 and AArch64.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <ucontext.h>

enum { NEVER, BEFORE, AFTER, TORN }; /* the call, or half of what a write was to write */
enum { TRACE_MAX = 8192, TORN_PARTS_MAX = 64, PAGE = 4096, STALL_SLICE_NS = 5000000 };

/* Shared with the process that watches. Calls count from 1; trace[n - 1] is the number of call n. */
struct control {
    int64_t kill_at, way;
    int64_t calls;
    int64_t stall_every; /* of the reads of files below `prefix` each n-th stalls; 0: none, and those that do go on */
    int64_t stall_ms;
    int64_t reads, stalled, stalling;
    char prefix[512];
    int32_t trace[TRACE_MAX];
};

static struct control *control;

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
__asm__(".text\n.globl trap_call\n.type trap_call,@function\n"
        "trap_call: mov %rdi,%rax; mov %rsi,%rdi; mov %rdx,%rsi; mov %rcx,%rdx; mov %r8,%r10; mov %r9,%r8;\n"
        "  mov 8(%rsp),%r9; syscall\n"
        ".globl trap_call_return\ntrap_call_return: ret\n");
static const int REGISTERS[] = {REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8, REG_R9};
#define ARGUMENT(context, n) ((context)->uc_mcontext.gregs[REGISTERS[n]])
#define RESULT(context) ((context)->uc_mcontext.gregs[REG_RAX])
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
__asm__(".text\n.globl trap_call\n.type trap_call,%function\n"
        "trap_call: mov x8,x0; mov x0,x1; mov x1,x2; mov x2,x3; mov x3,x4; mov x4,x5; mov x5,x6; svc #0\n"
        ".globl trap_call_return\ntrap_call_return: ret\n");
#define ARGUMENT(context, n) ((context)->uc_mcontext.regs[n])
#define RESULT(context) ((context)->uc_mcontext.regs[0])
#else
#error "only x86-64 and AArch64"
#endif

extern long trap_call(long number, long a, long b, long c, long d, long e, long f);
extern char trap_call_return[];

#define CALL(name) {SYS_##name, #name}
static const struct { int number; const char *name; } WATCHED[] = {
    CALL(openat), CALL(close), CALL(read), CALL(write), CALL(readv), CALL(writev), CALL(pread64), CALL(pwrite64),
    CALL(preadv), CALL(pwritev), CALL(preadv2), CALL(pwritev2), CALL(lseek), CALL(fallocate), CALL(ftruncate),
    CALL(truncate), CALL(flock), CALL(fcntl), CALL(ioctl), CALL(fstat), CALL(newfstatat), CALL(statx), CALL(getdents64),
    CALL(unlinkat), CALL(mkdirat), CALL(linkat), CALL(symlinkat), CALL(readlinkat), CALL(renameat2), CALL(fchmod),
    CALL(fchmodat), CALL(fchown), CALL(fchownat), CALL(faccessat), CALL(fsync), CALL(fdatasync), CALL(sync_file_range),
    CALL(dup), CALL(dup3), CALL(copy_file_range), CALL(sendfile), CALL(statfs), CALL(fstatfs), CALL(utimensat),
#ifdef SYS_open
    CALL(open), CALL(creat), CALL(stat), CALL(lstat), CALL(access), CALL(getdents), CALL(unlink), CALL(rmdir), CALL(mkdir),
    CALL(link), CALL(symlink), CALL(readlink), CALL(rename), CALL(renameat), CALL(chmod), CALL(chown), CALL(lchown), CALL(dup2),
#endif
#ifdef SYS_openat2
    CALL(openat2), CALL(faccessat2),
#endif
#ifdef SYS_close_range
    CALL(close_range),
#endif
};
enum { WATCHED_COUNT = sizeof WATCHED / sizeof *WATCHED };

const char *trap_name(int number)
{
    for (int i = 0; i < WATCHED_COUNT; i++)
        if (WATCHED[i].number == number)
            return WATCHED[i].name;
    return "";
}

static void die(void)
{
    for (;;)
        trap_call(SYS_kill, trap_call(SYS_getpid, 0, 0, 0, 0, 0, 0), SIGKILL, 0, 0, 0, 0);
}

/* Half of the first buffers of a pwritev, which need not be whole pages: direct I/O is switched off for that. */
static void tear(long number, const long *a)
{
    if (number != SYS_pwritev && number != SYS_pwritev2)
        return;
    const struct iovec *whole = (const struct iovec *)a[1];
    struct iovec part[TORN_PARTS_MAX];
    size_t left = 0;
    int count = 0;
    for (long i = 0; i < a[2]; i++)
        left += whole[i].iov_len;
    left = left / 2 + 1;
    for (; count < a[2] && count < TORN_PARTS_MAX && left; count++) {
        part[count] = whole[count];
        if (part[count].iov_len > left)
            part[count].iov_len = left;
        left -= part[count].iov_len;
    }
    trap_call(SYS_fcntl, a[0], F_SETFL, trap_call(SYS_fcntl, a[0], F_GETFL, 0, 0, 0, 0) & ~O_DIRECT, 0, 0, 0);
    trap_call(SYS_pwritev, a[0], (long)part, count, a[3], a[4], 0);
}

static int is_read(long number)
{
    return number == SYS_read || number == SYS_pread64 || number == SYS_readv || number == SYS_preadv || number == SYS_preadv2;
}

/* Whether the descriptor is of a file below the prefix. */
static int concerns(long fd)
{
    char link[32] = "/proc/self/fd/", target[512], digits[12];
    int at = 14, count = 0;
    do
        digits[count++] = (char)('0' + fd % 10);
    while (fd /= 10);
    while (count)
        link[at++] = digits[--count];
    link[at] = 0;
    long length = trap_call(SYS_readlinkat, AT_FDCWD, (long)link, (long)target, sizeof target, 0, 0);
    int i = 0;
    while (control->prefix[i] && i < length && control->prefix[i] == target[i])
        i++;
    return i && !control->prefix[i];
}

/* As a device does that does not answer for a while: whoever reads hangs. */
static void stall(void)
{
    __atomic_add_fetch(&control->stalled, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&control->stalling, 1, __ATOMIC_SEQ_CST);
    struct timespec slice = {0, STALL_SLICE_NS};
    int64_t slices = control->stall_ms * 1000000 / STALL_SLICE_NS;
    while (slices-- > 0 && __atomic_load_n(&control->stall_every, __ATOMIC_SEQ_CST))
        trap_call(SYS_nanosleep, (long)&slice, 0, 0, 0, 0, 0);
    __atomic_sub_fetch(&control->stalling, 1, __ATOMIC_SEQ_CST);
}

static void on_trap(int signal_number, siginfo_t *info, void *opaque)
{
    (void)signal_number;
    ucontext_t *context = opaque;
    long number = info->si_syscall, a[6];
    for (int i = 0; i < 6; i++)
        a[i] = (long)ARGUMENT(context, i);
    int64_t count = __atomic_add_fetch(&control->calls, 1, __ATOMIC_SEQ_CST);
    if (count <= TRACE_MAX)
        control->trace[count - 1] = (int32_t)number;
    int64_t way = count == control->kill_at ? control->way : NEVER;
    if (way == TORN)
        tear(number, a);
    if (way == BEFORE || way == TORN)
        die();
    int64_t every = __atomic_load_n(&control->stall_every, __ATOMIC_SEQ_CST);
    if (every && is_read(number) && concerns(a[0]) && __atomic_add_fetch(&control->reads, 1, __ATOMIC_SEQ_CST) % every == 0)
        stall();
    long result = trap_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (way == AFTER)
        die();
    RESULT(context) = result;
}

/* From now on all threads that this one starts, and itself. Returns 0, or the errno for which it cannot be done. */
int trap_arm(struct control *shared)
{
    struct sigaction action = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO | SA_NODEFER};
    uint64_t from = (uint64_t)(uintptr_t)trap_call_return;
    struct sock_filter filter[WATCHED_COUNT + 10];
    int n = 0;
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
    filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 0, 4);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer));
    filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)from, 0, 3);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer) + 4);
    filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(from >> 32), 0, 1);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < WATCHED_COUNT; i++)
        filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)WATCHED[i].number, WATCHED_COUNT - i, 0);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    struct sock_fprog program = {.len = (unsigned short)n, .filter = filter};
    control = shared;
    if (sigaction(SIGSYS, &action, 0) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        return errno;
    return 0;
}
