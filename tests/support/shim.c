// Replaces functions of libc in a process under test, by LD_PRELOAD.
//
// SHIM_CLOCK: file of 8 bytes with a signed number of seconds, which is added to the system clock.
// SHIM_NO_INOTIFY: the system has no more inotify instances.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("SHIM_CLOCK");
    if (path) offset = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, open(path, O_RDONLY), 0);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*original)(clockid_t, struct timespec *);
    if (!original) original = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = original(clock, time);
    if (offset && clock == CLOCK_REALTIME) time->tv_sec += *offset;
    return result;
}

int inotify_init1(int flags) {
    static int (*original)(int);
    if (!original) original = (int (*)(int))dlsym(RTLD_NEXT, "inotify_init1");
    if (!getenv("SHIM_NO_INOTIFY")) return original(flags);
    errno = EMFILE;
    return -1;
}
