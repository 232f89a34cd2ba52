/* Shares: one op's elements on several threads, which are the library's own. Python's threads would each take its lock before and after their share:
 * with 16 of them, and other lanes' threads at that lock, 8 MB of an update took four times as long as alone (H200 machine, 16 cores). */

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>

typedef void Work(const void *call, int64_t start, int64_t end);

typedef struct Team Team;

typedef struct {
    Team *team;
    int place;
    pthread_t thread;
} Member;

struct Team {
    pthread_mutex_t turn, lock; /* of who calls; of what follows */
    pthread_cond_t go, done;
    Work *work;
    const void *call;
    int64_t count, size;  /* of the op; of a share */
    int64_t block;        /* shares are multiples of it */
    int members, working; /* besides the caller, who takes the first share */
    unsigned round;       /* counts calls */
    int stop;
    Member member[];
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void *serve(void *argument) {
    Member *self = argument;
    Team *team = self->team;
    unsigned seen = 0;
    pthread_mutex_lock(&team->lock);
    for (;;) {
        while (team->round == seen && !team->stop)
            pthread_cond_wait(&team->go, &team->lock);
        if (team->stop)
            break;
        seen = team->round;
        const int64_t start = self->place * team->size, end = least(start + team->size, team->count);
        Work *const work = team->work;
        const void *const call = team->call;
        pthread_mutex_unlock(&team->lock);
        if (start < end)
            work(call, start, end);
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
        pthread_join(team->member[i].thread, NULL);
    pthread_cond_destroy(&team->go);
    pthread_cond_destroy(&team->done);
    pthread_mutex_destroy(&team->turn);
    pthread_mutex_destroy(&team->lock);
    free(team);
}

/* A team of `threads`, the caller of an op being one of them; fewer where the system gives no more. Shares are multiples of `block` elements, which is one
 * of every row that is summed. NULL for want of memory. */
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
    for (int place = 1; place < threads; place++) {
        Member *const member = &team->member[team->members];
        *member = (Member){.team = team, .place = place};
        if (pthread_create(&member->thread, NULL, serve, member))
            break;
        team->members++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return team;
}

/* Calls `work` on shares of `count` elements, on the whole where there is no team. Returns when all are done. */
static void in_shares(Team *team, int64_t count, Work *work, const void *call) {
    if (!team || count <= team->block) {
        work(call, 0, count);
        return;
    }
    pthread_mutex_lock(&team->turn);
    pthread_mutex_lock(&team->lock);
    const int64_t blocks = (count + team->block - 1) / team->block, threads = team->members + 1;
    team->work = work;
    team->call = call;
    team->count = count;
    team->size = (blocks + threads - 1) / threads * team->block;
    team->working = team->members;
    team->round++;
    const int64_t first = least(team->size, count);
    pthread_cond_broadcast(&team->go);
    pthread_mutex_unlock(&team->lock);
    work(call, 0, first);
    pthread_mutex_lock(&team->lock);
    while (team->working)
        pthread_cond_wait(&team->done, &team->lock);
    pthread_mutex_unlock(&team->lock);
    pthread_mutex_unlock(&team->turn);
}
