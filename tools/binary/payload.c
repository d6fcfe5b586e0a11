/* What this file carries behind its own code: parts, a list of what they hold, and 32 bytes that say where it is.
 *
 * The list is text, a line each, in a frame of zstd; tools/binary/pack.py writes it. Its numbers are used only after
 * its check sum.
 */
#define _GNU_SOURCE
#include "launcher.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#define DAMAGED "this file of localllm is damaged (%s); get it again"

struct end { /* the last bytes of the file, in the order of an x86 */
    char magic[8];
    uint64_t offset, length, bytes; /* of the list; bytes: unpacked */
};

static int this_program(void) {
    int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    if (file < 0)
        fail(FAULT, "localllm cannot read itself: %s; it needs /proc and the right to read its file", strerror(errno));
    return file;
}

static void read_exactly(int file, void *into, size_t length, off_t offset) {
    for (char *next = into; length;) {
        ssize_t came = pread(file, next, length, offset);
        if (came < 0 && errno == EINTR) continue;
        if (came <= 0) fail(FAULT, DAMAGED, "it ends too early");
        next += came, offset += came, length -= came;
    }
}

static char *read_list(int file) {
    struct stat self;
    struct end end;
    if (fstat(file, &self) || self.st_size < (off_t)sizeof end) fail(FAULT, DAMAGED, "it is too short");
    read_exactly(file, &end, sizeof end, self.st_size - sizeof end);
    if (memcmp(end.magic, "LOCALLLM", sizeof end.magic)) fail(FAULT, DAMAGED, "its end is missing");
    uint64_t rest = self.st_size - sizeof end;
    if (end.length > rest || end.offset != rest - end.length) fail(FAULT, DAMAGED, "its parts do not fit together");
    char *packed = malloc(end.length);
    if (!packed) fail(FAULT, NO_MEMORY);
    read_exactly(file, packed, end.length, end.offset);
    if (end.bytes == SIZE_MAX || ZSTD_getFrameContentSize(packed, end.length) != end.bytes)
        fail(FAULT, DAMAGED, "its list of files has changed");
    char *list = malloc(end.bytes + 1);
    if (!list) fail(FAULT, NO_MEMORY);
    if (ZSTD_decompress(list, end.bytes, packed, end.length) != end.bytes)
        fail(FAULT, DAMAGED, "its list of files has changed");
    list[end.bytes] = '\0';
    free(packed);
    return list;
}

/* What follows the word, if the line begins with it. */
static char *after(char *line, const char *word) {
    size_t length = strlen(word);
    return strncmp(line, word, length) ? NULL : line + length;
}

struct payload read_payload(void) {
    struct payload payload = {.file = this_program()};
    char *list = read_list(payload.file), *rest;
    size_t lines = 0;
    for (char *at = list; (at = strchr(at, '\n')); at++) lines++;
    payload.arguments = calloc(lines, sizeof *payload.arguments);
    payload.entries = calloc(lines, sizeof *payload.entries);
    payload.parts = calloc(lines, sizeof *payload.parts);
    if (!payload.arguments || !payload.entries || !payload.parts) fail(FAULT, NO_MEMORY);
    for (char *line = strtok(list, "\n"); line; line = strtok(NULL, "\n")) {
        if ((rest = after(line, "file "))) {
            struct entry *entry = &payload.entries[payload.entry_count++];
            entry->mode = S_IFREG | strtoul(rest, &rest, 8);
            entry->bytes = strtoll(rest, &rest, 10);
            entry->path = rest + 1;
        } else if ((rest = after(line, "folder "))) {
            payload.entries[payload.entry_count++] = (struct entry){.path = rest, .mode = S_IFDIR | 0700};
        } else if ((rest = after(line, "part "))) {
            struct part *part = &payload.parts[payload.part_count++];
            part->offset = strtoll(rest, &rest, 10);
            part->length = strtoull(rest, &rest, 10);
        } else if ((rest = after(line, "argument "))) payload.arguments[payload.argument_count++] = rest;
        else if ((rest = after(line, "program "))) payload.program = rest;
        else if ((rest = after(line, "digest "))) payload.digest = rest;
        else if ((rest = after(line, "bytes "))) payload.bytes = strtoll(rest, NULL, 10);
        else if ((rest = after(line, "cut "))) payload.cut = strtoll(rest, NULL, 10);
        else if ((rest = after(line, "glibc 2."))) payload.glibc = strtoul(rest, NULL, 10);
        else if ((rest = after(line, "time "))) payload.time = strtoll(rest, NULL, 10);
    }
    return payload;
}
