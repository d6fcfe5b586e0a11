/* The parts of this file to the contents of files that are there already and empty.
 *
 * Contents are one long row that was cut into parts, so that several threads may unpack: a part may end within a
 * file and the next one goes on there. The decoder checks each part against its XXH64.
 */
#define _GNU_SOURCE
#include "launcher.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>
#include <zstd_errors.h>

#define MOST_THREADS 8 /* `cut` bytes each */

static void write_at(int file, const uint8_t *from, size_t length, off_t offset, const char *folder) {
    while (length) {
        ssize_t went = pwrite(file, from, length, offset);
        if (went < 0 && errno == EINTR) continue;
        if (went < 0) cannot(folder);
        from += went, offset += went, length -= went;
    }
}

/* Contents follow one another in the order of the entries: where in them a part goes on writing. */
struct place {
    const struct entry *entry;
    off_t offset; /* in its file */
    int file;
};

static void write_on(struct place *place, int at, const uint8_t *from, size_t length, const char *folder) {
    while (length) {
        if (place->offset == place->entry->bytes) {
            if (place->file >= 0) close(place->file);
            *place = (struct place){place->entry + 1, 0, -1};
            continue;
        }
        if (place->file < 0) place->file = openat(at, place->entry->path, O_WRONLY | O_CLOEXEC);
        if (place->file < 0) cannot(folder);
        size_t left = place->entry->bytes - place->offset, now = length < left ? length : left;
        write_at(place->file, from, now, place->offset, folder);
        place->offset += now, from += now, length -= now;
    }
}

/* What the threads share: the next part that nobody has taken. */
struct work {
    const struct payload *payload;
    const uint8_t *self; /* this file */
    int at;
    const char *folder;
    atomic_size_t next;
};

static void unpack_part(const struct work *work, size_t number) {
    const struct payload *payload = work->payload;
    off_t begin = number * payload->cut, rest = payload->bytes - begin;
    off_t length = rest < payload->cut ? rest : payload->cut;
    struct place place = {payload->entries, begin, -1};
    for (; place.offset >= place.entry->bytes; place.entry++) place.offset -= place.entry->bytes;
    uint8_t *buffer = malloc(length);
    if (!buffer) fail(FAULT, NO_MEMORY);
    const struct part *part = &payload->parts[number];
    size_t unpacked = ZSTD_decompress(buffer, length, work->self + part->offset, part->length);
    if (ZSTD_getErrorCode(unpacked) == ZSTD_error_memory_allocation) fail(FAULT, NO_MEMORY);
    if (unpacked != (size_t)length)
        fail(FAULT, "this file of localllm is damaged (part %zu is not what was packed); get it again", number + 1);
    write_on(&place, work->at, buffer, length, work->folder);
    if (place.file >= 0) close(place.file);
    free(buffer);
}

static void *take_parts(void *shared) {
    struct work *work = shared;
    for (size_t number; (number = work->next++) < work->payload->part_count;)
        unpack_part(work, number);
    return NULL;
}

void unpack_parts(const struct payload *payload, int at, const char *folder) {
    struct stat self;
    struct work work = {payload, MAP_FAILED, at, folder, 0};
    if (!fstat(payload->file, &self))
        work.self = mmap(NULL, self.st_size, PROT_READ, MAP_PRIVATE, payload->file, 0);
    if (work.self == MAP_FAILED) fail(FAULT, "localllm cannot read itself: %s; free some memory", strerror(errno));
    cpu_set_t cores;
    size_t wanted = sched_getaffinity(0, sizeof cores, &cores) ? 1 : CPU_COUNT(&cores), count = 0;
    pthread_t others[MOST_THREADS];
    if (wanted > MOST_THREADS) wanted = MOST_THREADS;
    while (count + 1 < wanted && !pthread_create(&others[count], NULL, take_parts, &work)) count++;
    take_parts(&work);
    while (count--) pthread_join(others[count], NULL);
    munmap((void *)work.self, self.st_size);
}
