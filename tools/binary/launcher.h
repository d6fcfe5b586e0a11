/* What the files of the launcher share. docs/binary.md tells how they work together. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define NO_MEMORY "there is no memory left; free some"

enum { FAULT = 1, DISK_FULL = 3 }; /* exit codes, as localllm/errors.py has them */

struct entry {
    const char *path; /* from the folder on, without links or dots */
    mode_t mode;      /* with S_IFDIR or S_IFREG */
    off_t bytes;
};

struct part { /* a frame of zstd in this file; unpacked, `cut` bytes, the last one fewer */
    off_t offset;
    size_t length;
};

struct payload {
    int file; /* this program, open */
    const char *digest, *program;
    const char **arguments; /* that `program` gets before the user's */
    size_t argument_count, entry_count, part_count;
    off_t bytes, cut, time; /* all contents; of each part; when every file was last changed: a constant */
    unsigned long glibc;    /* the N of the least version 2.N that the program needs; 0: not known */
    struct entry *entries;  /* folders before what is in them; contents in this order */
    struct part *parts;
};

/* payload.c */
struct payload read_payload(void);

/* unpack.c */
bool is_whole(const struct payload *payload, const char *parent, const char *folder);
void unpack(const struct payload *payload, const char *parent, const char *folder);
void discard_unfinished(void);
_Noreturn void cannot(const char *folder); /* write there, because of errno */

/* parts.c */
void unpack_parts(const struct payload *payload, int at, const char *folder);

/* launcher.c */
_Noreturn void fail(int code, const char *form, ...) __attribute__((format(printf, 2, 3)));
char *joined(const char *folder, const char *name, const char *end);
