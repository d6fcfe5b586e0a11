/* localllm as one file: finds the program unpacked in the user's cache, or unpacks it, and becomes it.
 *
 * It becomes it by execv, so signals, exit codes, pipes and the terminal are the program's own.
 */
#define _GNU_SOURCE
#include "launcher.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

extern char **environ;

#define REMEDY "set XDG_CACHE_HOME to a folder that can be written"

void fail(int code, const char *form, ...) {
    static pthread_mutex_t first = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&first); /* and never unlocked: threads that fail as well have nothing to add */
    va_list values;
    va_start(values, form);
    fputs("error: ", stderr);
    vfprintf(stderr, form, values);
    fputc('\n', stderr);
    va_end(values);
    discard_unfinished();
    _exit(code);
}

char *joined(const char *folder, const char *name, const char *end) {
    char *path;
    if (asprintf(&path, "%s/%s%s", folder, name, end) < 0) fail(FAULT, NO_MEMORY);
    return path;
}

/* Without the system's own lookup, which a static program has not. */
static const char *home(void) {
    const char *home = getenv("HOME");
    if (home && *home) return home;
    FILE *users = fopen("/etc/passwd", "re");
    struct passwd *user = NULL;
    while (users && (user = fgetpwent(users)) && user->pw_uid != getuid()) continue;
    if (users) fclose(users);
    return user ? user->pw_dir : NULL;
}

/* Where users' caches lie, by the rules that localllm/settings.py follows. */
static char *cache(void) {
    const char *given = getenv("XDG_CACHE_HOME");
    if (given && *given) return joined(given, "localllm/binary", "");
    const char *folder = home();
    if (!folder || !*folder) fail(FAULT, "there is no home folder to unpack localllm into; " REMEDY);
    return joined(folder, ".cache/localllm/binary", "");
}

static void make_folders(char *path) {
    for (char *slash = path; slash; *slash = '/') {
        slash = strchr(slash + 1, '/');
        if (slash) *slash = '\0';
        struct stat there; /* as a folder that is there may be in one that cannot be written */
        if (stat(path, &there) && mkdir(path, 0700) && errno != EEXIST)
            fail(FAULT, "localllm cannot make %s to unpack into: %s; " REMEDY, path, strerror(errno));
        if (!slash) return;
    }
}

/* Nothing of another Python may show in this one, nor in the processes that it starts. */
static void clean_environment(void) {
    for (char **variable = environ; *variable;) {
        char *name = strndup(*variable, strcspn(*variable, "="));
        if (!name || strncmp(name, "PYTHON", 6) || unsetenv(name)) variable++;
        free(name);
    }
    setenv("PYTHONNOUSERSITE", "1", 1);
}

/* The N of the newest GLIBC_2.N that the library defines; 0 if it defines none. */
static unsigned long newest_glibc(const char *library) {
    struct stat status;
    int file = open(library, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    char *text = fstat(file, &status) ? MAP_FAILED : mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (text == MAP_FAILED) return 0;
    unsigned long newest = 99;
    for (char name[16]; newest; newest--) {
        int length = snprintf(name, sizeof name, "GLIBC_2.%lu", newest);
        if (memmem(text, status.st_size, name, length + 1)) break; /* with its end */
    }
    munmap(text, status.st_size);
    return newest;
}

/* Says so before anything is unpacked, where the loader would name a symbol. */
static void check_glibc(const struct payload *payload) {
    const char *const folders[] = {"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64"};
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        unsigned long found = newest_glibc(joined(folders[i], "libc.so.6", ""));
        if (!found) continue;
        if (found < payload->glibc)
            fail(FAULT, "this file needs glibc 2.%lu, and this system has 2.%lu; use a newer system, such as Debian 12, "
                 "Ubuntu 24.04 or RHEL 10, or install localllm with pip", payload->glibc, found);
        return;
    }
}

_Noreturn static void become(const struct payload *payload, const char *folder, int count, char **words) {
    char *program = joined(folder, payload->program, "");
    const char **all = calloc(payload->argument_count + count + 2, sizeof *all), **next = all;
    if (!all) fail(FAULT, NO_MEMORY);
    *next++ = program;
    for (size_t i = 0; i < payload->argument_count; i++) *next++ = payload->arguments[i];
    for (int i = 1; i < count; i++) *next++ = words[i];
    execv(program, (char **)all);
    if (errno == EACCES)
        fail(FAULT, "programs may not be run in %s; set XDG_CACHE_HOME to a folder where they may", folder);
    if (errno == ENOENT)
        fail(FAULT, "this system has no glibc; run localllm on one that has, or install it with pip");
    fail(FAULT, "%s cannot be run: %s; install localllm with pip", program, strerror(errno));
}

int main(int count, char **words) {
    struct payload payload = read_payload();
    char *parent = cache();
    make_folders(parent);
    char *absolute = realpath(parent, NULL);
    if (!absolute) fail(FAULT, "localllm cannot unpack into %s: %s; " REMEDY, parent, strerror(errno));
    char *folder = joined(absolute, payload.digest, "");
    if (!is_whole(&payload, absolute, folder)) {
        check_glibc(&payload);
        unpack(&payload, absolute, folder);
    }
    clean_environment();
    become(&payload, folder, count, words);
}
