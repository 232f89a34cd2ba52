// Source: answers that were computed in advance. They are scripts in this page's folder, because a
// page that was opened from a disk may load scripts, but may not fetch files.

const source = {
  files: new Map(),

  /** Returns the content of data/NAME.js. Throws an Error if there is none. */
  load(name) {
    if (!this.files.has(name)) {
      const file = {};
      file.content = new Promise((resolve, reject) => {
        const script = document.createElement("script");
        file.arrive = resolve;
        script.onerror = () => reject(new Error(`data/${name}.js: found no such file`));
        script.src = `data/${name}.js`;
        document.head.append(script);
      });
      this.files.set(name, file);
    }
    return this.files.get(name).content;
  },

  library() { return this.load("library"); },

  async ask(part, question) {
    if (["outlook", "first"].includes(part)) return null;  // the verdict needs no waiting
    const { models, machines } = await this.library();
    for (const [list, key] of [[models, "model"], [machines, "hardware"]]) {
      if (!list.some(({ name }) => name === question[key])) {
        throw new Error(`${key} ${question[key]}: found no answers for it; ` +
          "allowed: a name of the list; fix: choose one, or run `megatrain serve`");
      }
    }
    const answers = await this.load(`${question.model}--${question.hardware}`);
    const found = answers[`${question.batch}x${question.seq}`];
    if (!found) {
      const known = Object.keys(answers).map((key) => key.replace("x", " x ")).join(", ");
      throw new Error(`step: found ${question.batch || "auto"} x ${question.seq}; ` +
        `allowed: ${known}; fix: move a slider, or run \`megatrain serve\``);
    }
    if (found.error) throw new Error(found.error);
    return part === "policies" ? found.policies : found;
  },
};

/** Takes the content of a script in data/. Each of them calls it. */
function arrived(name, content) { source.files.get(name).arrive(content); }
