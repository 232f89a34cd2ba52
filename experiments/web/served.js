// Source: answers from the server that sent this page.

const source = {
  tab: crypto.randomUUID(),

  async library() { return (await fetch("api/library")).json(); },

  /** Returns one part of an answer: `outlook`, `first`, `verdict`, `advice` or `policies`. Throws
      an AbortError if the page has asked another question in the meantime, and an Error with one
      line for any other failure. */
  async ask(part, question, turn, signal) {
    const body = JSON.stringify({ ...question, tab: this.tab, turn });
    const headers = { "Content-Type": "application/json" };
    let response;
    try {
      response = await fetch(`api/${part}`, { method: "POST", headers, body, signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("the server does not answer; start `megatrain serve` again");
    }
    if (response.status === 409) throw new DOMException("superseded", "AbortError");
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    return answer;
  },
};
