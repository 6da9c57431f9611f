/* Flips bits that a process receives over TCP, as a faulty network card does behind TCP's checksum.
 *
 * Preloaded into workers. FLIP_EVERY: bytes from one flip to the next, on average; FLIP_SEED: where they fall.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t state, every, left; /* bytes that pass unharmed before the next flip */

static uint64_t draw(void) { /* splitmix64 */
    uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

__attribute__((constructor)) static void begin(void) {
    const char *seed = getenv("FLIP_SEED"), *distance = getenv("FLIP_EVERY");
    every = distance ? strtoull(distance, NULL, 10) : 0;
    state = (seed ? strtoull(seed, NULL, 10) : 0) + (uint64_t)getpid() % 7;
    if (every) left = draw() % (2 * every);
}

static int is_tcp(int fd) {
    int value = 0;
    socklen_t size = sizeof value;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &value, &size) || value != SOCK_STREAM) return 0;
    size = sizeof value;
    return !getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &value, &size) && (value == AF_INET || value == AF_INET6);
}

static void harm(unsigned char *bytes, uint64_t count) {
    pthread_mutex_lock(&lock);
    while (left < count) {
        bytes[left] ^= 1u << (draw() & 7);
        left += 1 + draw() % (2 * every);
    }
    left -= count;
    pthread_mutex_unlock(&lock);
}

static ssize_t harmed(int fd, const struct iovec *parts, int count, ssize_t received) {
    if (received > 0 && every && is_tcp(fd)) {
        uint64_t rest = (uint64_t)received;
        for (int i = 0; i < count && rest; i++) {
            uint64_t here = parts[i].iov_len < rest ? parts[i].iov_len : rest;
            harm(parts[i].iov_base, here);
            rest -= here;
        }
    }
    return received;
}

#define REAL(name, ...) ((ssize_t(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

ssize_t read(int fd, void *buffer, size_t size) {
    ssize_t received = REAL(read, int, void *, size_t)(fd, buffer, size);
    return harmed(fd, &(struct iovec){buffer, size}, 1, received);
}

ssize_t readv(int fd, const struct iovec *parts, int count) {
    return harmed(fd, parts, count, REAL(readv, int, const struct iovec *, int)(fd, parts, count));
}

ssize_t recv(int fd, void *buffer, size_t size, int flags) {
    ssize_t received = REAL(recv, int, void *, size_t, int)(fd, buffer, size, flags);
    return flags & MSG_PEEK ? received : harmed(fd, &(struct iovec){buffer, size}, 1, received);
}

ssize_t recvfrom(int fd, void *buffer, size_t size, int flags, struct sockaddr *from, socklen_t *length) {
    ssize_t received =
        REAL(recvfrom, int, void *, size_t, int, struct sockaddr *, socklen_t *)(fd, buffer, size, flags, from, length);
    return flags & MSG_PEEK ? received : harmed(fd, &(struct iovec){buffer, size}, 1, received);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    ssize_t received = REAL(recvmsg, int, struct msghdr *, int)(fd, message, flags);
    return flags & MSG_PEEK ? received : harmed(fd, message->msg_iov, (int)message->msg_iovlen, received);
}
