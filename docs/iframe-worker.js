// The search of a site that is read from files. Browsers start no Worker from a file, so its script runs in a hidden
// frame, which has the few names that the search's script uses: addEventListener and postMessage.
// The theme's plugin "offline" would load another such script from the network, but for a file of this name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #started;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      this.#started = new Promise((started) => script.addEventListener("load", started));
      script.src = url;
      inside.document.body.append(script);
    }

    // Messages that come before the script has been read are kept for it.
    postMessage(data) {
      const inside = this.#frame.contentWindow;
      this.#started.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
