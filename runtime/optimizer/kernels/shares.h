/* Distributes the elements of one op over threads of this library.
 *
 * Python threads are not used, because each would acquire the GIL before and after its work, which
 * made steps with small copies 21 to 68 % slower (docs/lab_notes.md). */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

typedef void Work(const void *call, int64_t start, int64_t end);

typedef struct Team Team;

struct Team {
    pthread_mutex_t turn; /* held by the calling thread during a call */
    pthread_mutex_t lock; /* protects all fields below, except `next` */
    pthread_cond_t go, done;
    Work *work;
    const void *call; /* arguments of `work`; null if there is nothing to do */
    int64_t count;
    int64_t block;        /* elements that a thread takes at a time */
    _Atomic int64_t next; /* the first element that no thread has taken yet */
    unsigned round;       /* number of calls so far */
    int members;          /* threads besides the calling one */
    int working;          /* members that take part in the current call */
    int stop;
    pthread_t member[];
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Works on one block after the other until no block is left. If a thread loses its core to a thread
 * of another lane, the other threads wait for only one block, not for a fixed share of the op. */
static void take_part(Team *team, Work *work, const void *call, int64_t count) {
    int64_t start;
    while ((start = atomic_fetch_add(&team->next, team->block)) < count)
        work(call, start, least(start + team->block, count));
}

static void *serve(void *argument) {
    Team *team = argument;
    unsigned seen = 0;
    pthread_mutex_lock(&team->lock);
    while (!team->stop) {
        if (team->round == seen || !team->call) { /* no new call, or it has already ended */
            seen = team->round;
            pthread_cond_wait(&team->go, &team->lock);
            continue;
        }
        seen = team->round;
        team->working++;
        Work *const work = team->work;
        const void *const call = team->call;
        const int64_t count = team->count;
        pthread_mutex_unlock(&team->lock);
        take_part(team, work, call, count);
        pthread_mutex_lock(&team->lock);
        if (--team->working == 0)
            pthread_cond_signal(&team->done);
    }
    pthread_mutex_unlock(&team->lock);
    return NULL;
}

/* Ends the threads of a team and frees its memory. No call may be running. */
void megatrain_disband(Team *team) {
    pthread_mutex_lock(&team->lock);
    team->stop = 1;
    pthread_cond_broadcast(&team->go);
    pthread_mutex_unlock(&team->lock);
    for (int i = 0; i < team->members; i++)
        pthread_join(team->member[i], NULL);
    pthread_cond_destroy(&team->go);
    pthread_cond_destroy(&team->done);
    pthread_mutex_destroy(&team->turn);
    pthread_mutex_destroy(&team->lock);
    free(team);
}

/* Returns a team of `threads` threads, including the thread that calls an op. The team is smaller
 * if the system cannot start all threads. `block` must be a multiple of the rows of every sum.
 * Returns NULL if there is no memory. */
Team *megatrain_team(int threads, int64_t block) {
    Team *team = calloc(1, sizeof *team + threads * sizeof *team->member);
    if (!team)
        return NULL;
    team->block = block;
    pthread_mutex_init(&team->turn, NULL);
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->go, NULL);
    pthread_cond_init(&team->done, NULL);
    sigset_t all, before; /* members block all signals, so Python's threads handle signals */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (team->members < threads - 1 &&
           !pthread_create(&team->member[team->members], NULL, serve, team))
        team->members++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return team;
}

/* Calls `work` on blocks that cover `count` elements, or once on all elements if `team` is null.
 * Returns when all elements are done. */
static void in_shares(Team *team, int64_t count, Work *work, const void *call) {
    if (!team || count <= team->block) {
        work(call, 0, count);
        return;
    }
    pthread_mutex_lock(&team->turn);
    pthread_mutex_lock(&team->lock);
    team->work = work;
    team->call = call;
    team->count = count;
    atomic_store(&team->next, 0);
    team->round++;
    pthread_cond_broadcast(&team->go);
    pthread_mutex_unlock(&team->lock);
    take_part(team, work, call, count);
    pthread_mutex_lock(&team->lock);
    team->call = NULL;
    while (team->working)
        pthread_cond_wait(&team->done, &team->lock);
    pthread_mutex_unlock(&team->lock);
    pthread_mutex_unlock(&team->turn);
}
