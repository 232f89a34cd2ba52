/* Shares: one op's elements on several threads, which are the library's own. Python's threads would each take its lock before and after their share: with
 * 16 of them, and other lanes' threads at that lock, steps with copies of 4 to 8 MiB took 21 to 68 % longer than with threads here, each with a fixed share
 * (H200 machine, 16 cores: experiments/results/h200-prove/runs). */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

typedef void Work(const void *call, int64_t start, int64_t end);

typedef struct Team Team;

struct Team {
    pthread_mutex_t turn, lock; /* of who calls; of what follows */
    pthread_cond_t go, done;
    Work *work;
    const void *call; /* null: nothing to do */
    int64_t count, block;
    _Atomic int64_t next; /* element that nobody has taken yet */
    unsigned round;       /* counts calls */
    int members, working; /* besides the caller; of them, who are at the call */
    int stop;
    pthread_t member[];
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Blocks are taken one by one: who loses its core for a while, to another lane's thread, keeps the others waiting for one block and not for a share of all. */
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
        if (team->round == seen || !team->call) { /* who comes late is not waited for */
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

/* A team of `threads`, the caller of an op being one of them; fewer where the system gives no more. They take `block` elements at a time, which is whole
 * rows of every sum. NULL for want of memory. */
Team *megatrain_team(int threads, int64_t block) {
    Team *team = calloc(1, sizeof *team + threads * sizeof *team->member);
    if (!team)
        return NULL;
    team->block = block;
    pthread_mutex_init(&team->turn, NULL);
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->go, NULL);
    pthread_cond_init(&team->done, NULL);
    sigset_t all, before; /* signals are Python's */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (team->members < threads - 1 && !pthread_create(&team->member[team->members], NULL, serve, team))
        team->members++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return team;
}

/* Calls `work` on blocks of `count` elements, on the whole where there is no team. Returns when all are done. */
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
