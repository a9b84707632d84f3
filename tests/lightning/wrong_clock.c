/* Stands in front of what reads or waits by the time of day, which it shows with as many seconds more as a file says.
   Who waits until a moment of that clock waits for the clock that it sees, also where that is set meanwhile. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *ahead;
#define NEXT(name) static __typeof__(&name) next; if (!next) next = dlsym(RTLD_NEXT, #name)
#define SLICE 50000000L

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("WRONG_CLOCK"), O_RDONLY);
    ahead = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    NEXT(clock_gettime);
    int result = next(clock, now);
    if (!result && ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *ahead;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where) *where = exact.tv_sec;
    return exact.tv_sec;
}

/* Returns whether a moment has come on the clock that is shown, and if not when to look again, on the true one. */
static int come(const struct timespec *until, struct timespec *slice) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t left = (until->tv_sec - now.tv_sec) * 1000000000L + until->tv_nsec - now.tv_nsec;
    if (left <= 0) return 1;
    int64_t at = (now.tv_sec - *ahead) * 1000000000L + now.tv_nsec + (left < SLICE ? left : SLICE);
    *slice = (struct timespec){at / 1000000000L, at % 1000000000L};
    return 0;
}

/* A condition does not say which clock it goes by; the monotonic one counts from the start of the machine. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    NEXT(pthread_cond_timedwait);
    struct timespec slice;
    if (until->tv_sec < 1000000000L) return next(condition, mutex, until);
    if (come(until, &slice)) return ETIMEDOUT;
    int result = next(condition, mutex, &slice);
    return result == ETIMEDOUT ? 0 : result; /* woken for nothing, as may always be */
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    NEXT(sem_timedwait);
    struct timespec slice;
    while (!come(until, &slice)) {
        int result = next(semaphore, &slice);
        if (!result || errno != ETIMEDOUT) return result;
    }
    errno = ETIMEDOUT;
    return -1;
}

long syscall(long number, ...) {
    NEXT(syscall);
    va_list list;
    va_start(list, number);
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    struct timespec slice, *until = (struct timespec *)a[3];
    if (number != SYS_futex || !(a[1] & FUTEX_CLOCK_REALTIME) || !until)
        return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (come(until, &slice)) return errno = ETIMEDOUT, -1;
    long result = next(number, a[0], a[1], a[2], (long)&slice, a[4], a[5]);
    return result && errno == ETIMEDOUT ? 0 : result;
}
