/* From the parts of this file to a folder that is whole or not there, and whether it still is.
 *
 * A lock lets one process unpack while others wait. It writes into `DIGEST.part` and then renames it, so what is killed
 * in between leaves a folder that nobody looks at and the next one deletes. The disk may take a minute for a gigabyte,
 * and only a crash of the system loses what it has not written: so a process in the background waits for it, and until
 * it has, `DIGEST.boot` holds the id of this boot, and after another boot the folder does not count.
 */
#define _GNU_SOURCE
#include "launcher.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#define ANOTHER "set XDG_CACHE_HOME to a folder of another disk"
#define BOOT_ID "/proc/sys/kernel/random/boot_id"
#define ID_BYTES 36
#define ROOM(bytes) ((bytes) / 8 * 9) /* blocks that are not full, and folders */

static const char *unfinished; /* a folder that is of no use to anybody if this ends now */
static const char *unwritten;  /* its `DIGEST.boot` */

_Noreturn void cannot(const char *folder) {
    if (errno == ENOSPC || errno == EDQUOT)
        fail(DISK_FULL, "the disk of %s is full; free some of it, or " ANOTHER, folder);
    fail(FAULT, "localllm cannot be unpacked into %s: %s; " ANOTHER, folder, strerror(errno));
}

/* Looks at names, sizes, rights and times, which every change changes, and not at contents: there is a gigabyte. */
static bool is_intact(const struct payload *payload, const char *folder) {
    int at = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    struct stat found;
    bool whole = at >= 0 && !fstat(at, &found) && found.st_mode == (S_IFDIR | 0700) && found.st_uid == geteuid() &&
                 found.st_mtime == payload->time;
    for (size_t i = 0; whole && i < payload->entry_count; i++) {
        const struct entry *entry = &payload->entries[i];
        whole = !fstatat(at, entry->path, &found, AT_SYMLINK_NOFOLLOW) && found.st_mode == entry->mode &&
                found.st_mtime == payload->time && (S_ISDIR(entry->mode) || found.st_size == entry->bytes);
    }
    if (at >= 0) close(at);
    return whole;
}

static bool read_id(const char *path, char *id) {
    int file = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    bool whole = file >= 0 && read(file, id, ID_BYTES) == ID_BYTES;
    if (file >= 0) close(file);
    return whole;
}

/* Whether the disk has all of it, or the system that has not crashed since. */
static bool is_kept(const char *mark) {
    char then[ID_BYTES], now[ID_BYTES];
    if (access(mark, F_OK)) return true;
    return read_id(mark, then) && read_id(BOOT_ID, now) && !memcmp(then, now, ID_BYTES);
}

bool is_whole(const struct payload *payload, const char *parent, const char *folder) {
    return is_intact(payload, folder) && is_kept(joined(parent, payload->digest, ".boot"));
}

/* On the disk before anything else is written; false if this boot has no id. */
static bool mark_boot(const char *mark, const char *parent) {
    char id[ID_BYTES];
    if (!read_id(BOOT_ID, id)) return false;
    int file = open(mark, O_CREAT | O_TRUNC | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600);
    int folder = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0 || folder < 0 || write(file, id, ID_BYTES) != ID_BYTES || fsync(file) || fsync(folder)) cannot(parent);
    close(file), close(folder);
    return true;
}

/* Waits for the disk in a process of its own, which no terminal, pipe or parent waits for. */
static void write_in_background(const char *mark, const char *parent) {
    pid_t child = fork();
    if (child > 0) waitpid(child, NULL, 0);
    if (child) return; /* without a process the mark stays, and the next boot unpacks again */
    if (setsid() < 0 || fork()) _exit(0);
    int folder = open(parent, O_RDONLY | O_DIRECTORY), nothing = open("/dev/null", O_RDWR);
    for (int file = 0; file < 3; file++) dup2(nothing, file);
    if (folder > 3) folder = dup2(folder, 3);
    close_range(4, ~0U, 0);
    if (!chdir("/") && folder >= 0 && !syncfs(folder)) unlink(mark);
    _exit(0);
}

static int delete_one(const char *path, const struct stat *found, int kind, struct FTW *place) {
    (void)found, (void)kind, (void)place;
    return remove(path);
}

static void delete(const char *folder) {
    nftw(folder, delete_one, 16, FTW_DEPTH | FTW_PHYS);
}

void discard_unfinished(void) {
    if (unfinished) delete(unfinished);
    if (unwritten) unlink(unwritten);
}

static void make_entries(const struct payload *payload, int at, const char *folder) {
    for (size_t i = 0; i < payload->entry_count; i++) {
        const struct entry *entry = &payload->entries[i];
        mode_t mode = entry->mode & ~S_IFMT;
        int made = S_ISDIR(entry->mode) ? mkdirat(at, entry->path, mode)
                                        : openat(at, entry->path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, mode);
        if (made < 0) cannot(folder);
        if (S_ISREG(entry->mode)) close(made);
    }
}

/* From the last one back, as a folder's time changes when something is made in it. */
static void set_times(const struct payload *payload, int at, const char *folder) {
    const struct timespec times[2] = {{.tv_sec = payload->time}, {.tv_sec = payload->time}};
    for (size_t i = payload->entry_count; i--;)
        if (utimensat(at, payload->entries[i].path, times, 0)) cannot(folder);
    if (futimens(at, times)) cannot(folder);
}

static void check_room(const struct payload *payload, const char *parent) {
    struct statvfs disk;
    if (statvfs(parent, &disk)) return; /* then writing will tell */
    double need = ROOM(payload->bytes), have = (double)disk.f_bavail * disk.f_frsize;
    if (have < need)
        fail(DISK_FULL, "localllm takes %.0f MB in %s, where %.0f MB are free; free some, or " ANOTHER, need / 1e6,
             parent, have / 1e6);
}

static void tell_of_others(const struct payload *payload, const char *parent) {
    DIR *all = opendir(parent);
    int others = 0;
    for (struct dirent *one; all && (one = readdir(all));)
        others += strlen(one->d_name) == strlen(payload->digest) && strcmp(one->d_name, payload->digest);
    if (all) closedir(all);
    if (others) fprintf(stderr, "localllm: unpacked; %d other version(s) in %s can be deleted\n", others, parent);
}

/* Into `part`, then in one step to its place. */
static void unpack_beside(const struct payload *payload, const char *parent, const char *folder) {
    char *part = joined(parent, payload->digest, ".part"), *old = joined(parent, payload->digest, ".old");
    char *mark = joined(parent, payload->digest, ".boot");
    delete(part), delete(old);
    check_room(payload, parent);
    unwritten = mark;
    bool is_marked = mark_boot(mark, parent);
    mode_t mask = umask(0);
    int at = mkdir(part, 0700) ? -1 : open(part, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (at < 0) cannot(parent);
    unfinished = part;
    make_entries(payload, at, part);
    unpack_parts(payload, at, part);
    set_times(payload, at, part);
    umask(mask);
    if (!is_marked && (syncfs(at) || (unlink(mark) && errno != ENOENT))) cannot(parent);
    close(at);
    rename(folder, old); /* a damaged one; what runs from it keeps its open files */
    if (rename(part, folder)) cannot(parent);
    unfinished = unwritten = NULL;
    if (is_marked) write_in_background(mark, parent);
    delete(old);
}

void unpack(const struct payload *payload, const char *parent, const char *folder) {
    int lock = open(joined(parent, payload->digest, ".lock"), O_CREAT | O_RDWR | O_CLOEXEC, 0600), failed;
    if (lock < 0) cannot(parent);
    while ((failed = flock(lock, LOCK_EX)) && errno == EINTR) continue;
    if (failed) cannot(parent);
    if (!is_whole(payload, parent, folder)) { /* no other process has done it meanwhile */
        bool told = isatty(STDERR_FILENO);
        if (told) fprintf(stderr, "localllm: unpacking %.0f MB into %s, once\n", payload->bytes / 1e6, parent);
        unpack_beside(payload, parent, folder);
        if (told) tell_of_others(payload, parent);
    }
    close(lock);
}
